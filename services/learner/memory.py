"""Which memory of the learner sleeps, and what that forbids: the parent's side of Sleep and Wake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from antiphon.learner.v1 import ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.common.grants import tag_name
from services.common.operations import Operation, Operations, Report
from services.common.tenancy import TenantGuard
from services.learner.ranks import Ranks

WEIGHTS = grant_pb2.MEMORY_TAG_WEIGHTS
OPTIMIZER = grant_pb2.MEMORY_TAG_OPTIMIZER
TAGS = (WEIGHTS, OPTIMIZER)
FREED_SHARE = 0.9
DEVICES_SECONDS = 10.0
"""By then every rank has said what its GPU holds, beside whatever it does."""
SMALL_BLOCKS_BYTES = 64 << 20
"""Of what slept so much may stay behind in blocks that small tensors share with others."""


class LearnerMemory:
    """The tags that sleep. Each Sleep and Wake takes its turn among the other work of the ranks."""

    def __init__(self, ranks: Ranks, turn: asyncio.Lock, guard: TenantGuard, on_change: Callable[[], None]) -> None:
        self._ranks = ranks
        self._turn = turn
        self._guard = guard
        self._on_change = on_change
        self._asleep: set[grant_pb2.MemoryTag] = set()
        self._sleeps: Operations[tenant_pb2.SleepResponse] = Operations("sleep")
        self._wakes: Operations[tenant_pb2.WakeResponse] = Operations("wake")

    @property
    def asleep(self) -> list[grant_pb2.MemoryTag]:
        return sorted(self._asleep)

    def require(self, what: str, *tags: grant_pb2.MemoryTag) -> None:
        """Raises Conflict when one of the tags sleeps. Call it when the turn has come: it may sleep by then."""
        if missing := sorted(self._asleep & set(tags)):
            raise Conflict(f"{what}: {_names(missing)} sleeps; wake it first, under a grant that names it")

    async def say_loaded(self) -> None:
        """Says what the ranks took when they loaded the model; when NATS is away, the guard says it later.

        Raises Unavailable when a rank does not say what it took.
        """
        if not self._guard.shares_gpus:
            return
        response = tenant_pb2.WakeResponse()
        for device in await self.devices():
            held = sum(part.bytes for part in device.held)
            response.devices.add(
                uuid=device.uuid, free_bytes_before=device.free_bytes + held, free_bytes_after=device.free_bytes
            )
        with suppress(Unavailable):
            await self._guard.woke(response, TAGS)

    async def devices(self) -> list[tenant_pb2.DeviceMemory]:
        """What each rank's GPU holds, read there now, beside the rank's work; none on a CPU.

        Raises Unavailable when a rank is lost or does not answer in time.
        """
        try:
            async with asyncio.timeout(DEVICES_SECONDS):
                replies = await self._ranks.run_all(ranks_pb2.RankCommand(memory=ranks_pb2.RankMemory()))
        except TimeoutError:
            raise Unavailable(f"a rank did not say within {DEVICES_SECONDS:.0f} s what its GPU holds") from None
        return [reply.memory for reply in replies if reply.HasField("memory")]

    def sleep(self, request: tenant_pb2.SleepRequest) -> Operation[tenant_pb2.SleepResponse]:
        """Begins to give memory back, or attaches to that request. Raises InvalidRequest."""
        _ = self._ranks.hello
        tags = _known("sleep", request.tags)
        if request.discard_weights:
            raise InvalidRequest("sleep: discard_weights: a learner's weights are nowhere else; they are always kept")
        return self._sleeps.start_or_attach(
            request.request_id, _fingerprint(request), lambda report: self._sleep(request, tags, report)
        )

    def wake(self, request: tenant_pb2.WakeRequest) -> Operation[tenant_pb2.WakeResponse]:
        """Begins to take memory, or attaches to that request. Raises InvalidRequest."""
        _ = self._ranks.hello
        tags = _known("wake", request.tags)
        return self._wakes.start_or_attach(
            request.request_id, _fingerprint(request), lambda report: self._wake(request, tags, report)
        )

    async def _sleep(
        self, request: tenant_pb2.SleepRequest, tags: Sequence[grant_pb2.MemoryTag], report: Report
    ) -> tenant_pb2.SleepResponse:
        async with self._guard.moving(request.token), self._its_turn("sleep", request.deadline_seconds):
            begin = time.monotonic()
            report("offload", 0, 1)
            going = [tag for tag in tags if tag not in self._asleep]
            replies = await self._ranks.run_all(ranks_pb2.RankCommand(sleep=ranks_pb2.RankSleep(tags=going)))
            changes = [reply.memory_change for reply in replies if reply.HasField("memory_change")]
            self._judge(going, changes)
            self._asleep |= set(going)
            self._on_change()
            devices = [change.device for change in changes]
            response = tenant_pb2.SleepResponse(devices=devices, seconds=time.monotonic() - begin)
            await self._guard.slept(response, tags)
            return response

    async def _wake(
        self, request: tenant_pb2.WakeRequest, tags: Sequence[grant_pb2.MemoryTag], report: Report
    ) -> tenant_pb2.WakeResponse:
        async with self._guard.moving(request.token, tags), self._its_turn("wake", request.deadline_seconds):
            begin = time.monotonic()
            report("reload", 0, 1)
            coming = [tag for tag in tags if tag in self._asleep]
            try:
                replies = await self._ranks.run_all(ranks_pb2.RankCommand(wake=ranks_pb2.RankWake(tags=coming)))
            except Overloaded:
                # Ranks whose GPU had room give it back: all sleep, as before.
                await self._ranks.run_all(ranks_pb2.RankCommand(sleep=ranks_pb2.RankSleep(tags=coming)))
                raise
            self._asleep -= set(coming)
            self._on_change()
            devices = [reply.memory_change.device for reply in replies if reply.HasField("memory_change")]
            response = tenant_pb2.WakeResponse(devices=devices, seconds=time.monotonic() - begin)
            await self._guard.woke(response, tags)
            return response

    @asynccontextmanager
    async def _its_turn(self, what: str, deadline_seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(deadline_seconds, 0.0)):
                await self._turn.acquire()
        except TimeoutError:
            raise Expired(
                f"{what}: the work under way did not end within {deadline_seconds:.0f} s; nothing changed, ask again"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    def _judge(self, tags: Sequence[grant_pb2.MemoryTag], changes: Iterable[ranks_pb2.RankMemoryChange]) -> None:
        """Ends the ranks when memory that sleeps is not free: only their end gives it back for sure."""
        for change in changes:
            before, after = change.device.free_bytes_before, change.device.free_bytes_after
            if after - before < FREED_SHARE * change.tag_bytes - SMALL_BLOCKS_BYTES:
                problem = (
                    f"sleep: {_names(tags)} held {change.tag_bytes} bytes of {change.device.uuid}, but only "
                    f"{after - before} became free ({before} before, {after} after); the ranks are ended"
                )
                self._ranks.give_up(problem)
                raise Conflict(problem)


def _known(what: str, tags: Sequence[grant_pb2.MemoryTag]) -> list[grant_pb2.MemoryTag]:
    """The tags asked for, all when none is. Raises InvalidRequest for one that a learner has not."""
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise InvalidRequest(f"{what}: a learner has no {_names(unknown)}; expected {_names(TAGS)}")
    return [tag for tag in TAGS if tag in tags or not tags]


def _names(tags: Iterable[grant_pb2.MemoryTag]) -> str:
    return " and ".join(tag_name(tag) for tag in tags)


def _fingerprint(request: tenant_pb2.SleepRequest | tenant_pb2.WakeRequest) -> bytes:
    copy = type(request).FromString(request.SerializeToString())
    copy.ClearField("request_id")
    copy.ClearField("deadline_seconds")
    copy.ClearField("token")
    return copy.SerializeToString(deterministic=True)
