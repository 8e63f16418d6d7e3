"""Giving the GPUs' memory up and taking it again: Sleep and Wake, each measured on the devices.

READY | STALE ──Sleep──► ASLEEP ──Wake(WEIGHTS, KV)──► the last probe generated again ──► READY, or STALE
                           └─(weights discarded)─ Wake(WEIGHTS) ──► STALE, KV asleep: a publication fills it, and its
                                                                    commit wakes KV between load and probe
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS, MemoryTag

from services.common.errors import AntiphonError, Conflict, Expired, InvalidRequest, Overloaded
from services.common.grants import gib, tag_name
from services.rollout.engine import DeviceMemory, Engine, EngineDead
from services.rollout.gate import Gate
from services.rollout.states import ASLEEP, FAILED, READY, STALE, STOPPING, UPDATING, Life
from services.rollout.transfer_group import TransferGroup

logger = logging.getLogger(__name__)

ALL_TAGS = frozenset((MEMORY_TAG_WEIGHTS, MEMORY_TAG_KV))
FREED_SHARE = 0.9
"""Of what the tags held, this much must come free, by the driver."""
RETRY_AFTER_SECONDS = 1.0
ENGINE_SECONDS = 120.0
"""An engine that takes its memory and is not done by then is torn."""
# The same kernels on the same weights in the same batch give the same bits; this is room for a library that does not.
PROBE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class DeviceChange:
    """Free bytes of one GPU, by the driver, around a sleep or a wake."""

    uuid: str
    free_bytes_before: int
    free_bytes_after: int


@dataclass(frozen=True)
class Change:
    """What a sleep or a wake did; without devices on CPU and where there was nothing to do."""

    devices: Sequence[DeviceChange] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class _OwnProbe:
    """What this engine computed of a probe when it committed."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Sleeping:
    """Which memory of one engine sleeps, and the ways there and back. One request at a time."""

    def __init__(self, engine: Engine, life: Life, gate: Gate, group: TransferGroup) -> None:
        self._engine = engine
        self._life = life
        self._gate = gate
        self._group = group
        self._lock = asyncio.Lock()
        self._asleep: set[MemoryTag] = set()
        self._discarded = False
        self._served = False
        """Whether it was READY when it went to sleep."""
        self._own_probe: _OwnProbe | None = None

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags that sleep now, in the order of their numbers."""
        return sorted(self._asleep)

    @property
    def busy(self) -> bool:
        """Whether a sleep or a wake is under way."""
        return self._lock.locked()

    def committed(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """A publication filled the weights; `logprobs` are the engine's own of its probe."""
        self._discarded = False
        self._own_probe = _OwnProbe(tuple(token_ids), tuple(logprobs))

    async def sleep(self, tags: Collection[MemoryTag], *, discard_weights: bool, deadline_seconds: float) -> Change:
        """Waits until the engine is idle, then gives all its memory up; new requests are held meanwhile, then refused.

        The transfer group is left first: the next publication joins another one.

        Raises InvalidRequest (other tags than all; an engine that cannot), Conflict (an update is under way; less came
        free than was held: the worker is FAILED then), Expired (not idle in time: nothing sleeps, work goes on).
        """
        if not self._engine.info.can_sleep:
            raise InvalidRequest("Sleep: this worker was started without the means to: it does not share its GPUs")
        if tags and set(tags) != ALL_TAGS:
            raise InvalidRequest(f"Sleep: weights and keys and values sleep together here, got {_named(tags)}")
        async with self._lock:
            if self._asleep == ALL_TAGS:
                return Change()
            self._refuse_while_updating("Sleep")
            async with self._gate.drained(deadline_seconds):
                self._refuse_while_updating("Sleep")
                begin = time.monotonic()
                try:
                    await self._group.leave()
                    before = await self._engine.memory()
                    await self._engine.sleep(discard_weights=discard_weights)
                    after = await self._engine.memory()
                    changes = _changes(before, after)
                    _require_freed(before, changes)
                except AntiphonError as error:
                    self._fail(f"Sleep: {error}")
                    raise
                self._refuse_if_over()
                change = Change(changes, time.monotonic() - begin)
                if self._life.state != ASLEEP:
                    self._served = self._life.state == READY
                    self._life.move(ASLEEP, "weights discarded" if discard_weights else "weights kept in host memory")
                if MEMORY_TAG_WEIGHTS not in self._asleep:
                    self._discarded = discard_weights
                self._asleep = set(ALL_TAGS)
        logger.info("asleep in %.3f s: %s", change.seconds, _told(change.devices))
        return change

    async def wake(self, tags: Collection[MemoryTag], *, deadline_seconds: float) -> Change:
        """Takes the memory of the tags again, which are as `wakeable` answered; of none, nothing.

        When all is awake the probe of the last commit is generated again: READY when it gives the same as then, else
        STALE. Over discarded weights: STALE at once, and keys and values go on sleeping until a commit.
        Raises InvalidRequest (keys and values over weights that sleep or were discarded), Conflict (an update is under
        way), Overloaded (too little free memory) or Expired (the deadline has passed): then nothing was woken;
        EngineDead. The deadline bounds what comes before memory is taken, and the probe.
        """
        async with self._lock:
            wanted = (self.wakeable(tags) if tags else set()) & self._asleep
            if not wanted:
                return Change()
            self._refuse_while_updating("Wake")
            end = time.monotonic() + deadline_seconds
            if time.monotonic() >= end:
                raise Expired(
                    f"Wake: the deadline passed before {_named(wanted)} could be taken; nothing was woken, ask again"
                )
            change = await self._wake(wanted)
            if self._discarded:
                if self._life.state == ASLEEP:
                    self._life.move(STALE, "its weights were discarded")
            elif not self._asleep:
                await self._serve_again(end)
        logger.info("awake in %.3f s: %s, %s", change.seconds, _named(wanted), _told(change.devices))
        return change

    async def wake_kv(self) -> Change | None:
        """Wakes keys and values over weights that were just loaded; None when they are awake. Raises as `wake` does."""
        if MEMORY_TAG_KV not in self._asleep:
            return None
        async with self._lock:
            return await self._wake({MEMORY_TAG_KV})

    def wakeable(self, tags: Collection[MemoryTag]) -> set[MemoryTag]:
        """The tags themselves, or without any all that sleep and may be woken. Raises InvalidRequest as `wake` does."""
        wanted = set(tags)
        if not wanted:
            return self._asleep & {MEMORY_TAG_WEIGHTS} if self._discarded else set(self._asleep)
        if not wanted <= ALL_TAGS:
            raise InvalidRequest(f"Wake: this worker has weights and keys and values, got {_named(tags)}")
        if MEMORY_TAG_KV in wanted and self._discarded:
            raise InvalidRequest(
                "Wake: the weights were discarded; wake the weights alone and publish a policy, its commit wakes keys "
                "and values"
            )
        if MEMORY_TAG_KV in wanted - {MEMORY_TAG_WEIGHTS} and MEMORY_TAG_WEIGHTS in self._asleep - wanted:
            raise InvalidRequest("Wake: keys and values are woken with the weights or after them")
        return wanted

    def _refuse_while_updating(self, what: str) -> None:
        if self._life.state == UPDATING:
            raise Conflict(f"{what}: an update is under way ({self._life.reason}); commit it or let it end first")
        self._refuse_if_over()

    def _refuse_if_over(self) -> None:
        """The worker may have been stopped, and the engine may have died, while something was waited for."""
        if self._life.state in (STOPPING, FAILED):
            raise self._life.refusal()

    async def _wake(self, tags: set[MemoryTag]) -> Change:
        before = await self._engine.memory()
        for device in before:
            needed = device.waking_bytes(tags)
            if device.free_bytes < needed:
                raise Overloaded(
                    f"{device.uuid}: {_named(tags)} need {gib(needed)}, {gib(device.free_bytes)} of "
                    f"{gib(device.total_bytes)} are free, {gib(needed - device.free_bytes)} are missing; this worker "
                    f"holds {gib(device.sleepable_bytes)} there, others the rest: put them to sleep first",
                    RETRY_AFTER_SECONDS,
                )
        begin = time.monotonic()
        try:
            # Not the caller's deadline: memory that is half taken is of no use to anybody.
            await self._engine.wake(tags, deadline_seconds=ENGINE_SECONDS)
            after = await self._engine.memory()
            _require_awake(after, tags)
        except AntiphonError as error:
            self._fail(f"Wake: {error}")
            raise
        self._refuse_if_over()
        self._asleep -= tags
        return Change(_changes(before, after), time.monotonic() - begin)

    async def _serve_again(self, end: float) -> None:
        """All is awake over the weights it slept with: whether they still give what they gave."""
        policy = self._life.policy
        if not self._served or self._own_probe is None or policy is None:
            self._life.move(STALE, "it was STALE when it went to sleep")
            return
        then = self._own_probe
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0.001)):
                now = await self._engine.probe(then.token_ids)
        except TimeoutError:
            self._life.move(STALE, "after the Wake its probe was not answered in time")
            return
        except AntiphonError as error:
            self._fail(f"Wake: the probe: {error}")
            raise
        self._refuse_if_over()
        difference = max(abs(a - b) for a, b in zip(now, then.logprobs, strict=True))
        if difference <= PROBE_TOLERANCE:
            self._life.move(READY, f"version {policy.version}, as before it slept", verified=policy)
        else:
            self._life.move(STALE, f"after the Wake its probe is off by {difference:.3g}: the weights are others")

    def _fail(self, reason: str) -> None:
        if self._life.state not in (STOPPING, FAILED):
            self._life.move(FAILED, reason)


def _changes(before: Sequence[DeviceMemory], after: Sequence[DeviceMemory]) -> list[DeviceChange]:
    free = {device.uuid: device.free_bytes for device in after}
    return [DeviceChange(device.uuid, device.free_bytes, free[device.uuid]) for device in before]


def _require_freed(before: Sequence[DeviceMemory], changes: Sequence[DeviceChange]) -> None:
    for device, change in zip(before, changes, strict=True):
        freed = change.free_bytes_after - change.free_bytes_before
        if freed < FREED_SHARE * device.sleepable_bytes:
            raise Conflict(
                f"{device.uuid}: {gib(device.sleepable_bytes)} were put to sleep and {gib(freed)} came free on the "
                f"device; at least {FREED_SHARE:.0%} must. This worker ends, and its memory with it"
            )


def _require_awake(after: Sequence[DeviceMemory], tags: Collection[MemoryTag]) -> None:
    for device in after:
        if left := device.waking_bytes(tags):
            raise EngineDead(f"{device.uuid}: of {_named(tags)}, {gib(left)} are asleep after the wake")


def _named(tags: Iterable[MemoryTag]) -> str:
    return ", ".join(tag_name(tag) for tag in sorted(tags))


def _told(devices: Sequence[DeviceChange]) -> str:
    return (
        "; ".join(
            f"{device.uuid} free {gib(device.free_bytes_before)} -> {gib(device.free_bytes_after)}"
            for device in devices
        )
        or "no device"
    )
