"""Taking a policy: join a transfer group, hold requests, receive, verify, load, probe, serve.

    JoinTransfer ──► (group) ──► BeginUpdate ──► receiving ──► arrived ──► CommitUpdate ──► READY
                                     │              │             │             │
                                     └──────────────┴── any failure: STALE, group left, no policy served ◄┘

Where GPUs are shared the group lasts for one publication: what it maps is the learner's memory, which sleeps next.

On CPU the model keeps what it had until the load; on CUDA it is loaded in place from the first bucket on, and a failure
leaves it torn until a complete update. Keys and values that sleep are woken between load and probe.

An open update has one watcher: it ends the update when the transfer breaks or when nobody commits, so that held
requests never wait for a coordinator that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common.errors import AntiphonError, Conflict, Expired, Unavailable
from services.rollout.engine import Engine, EngineDead, Received, Unmatched
from services.rollout.gate import Gate
from services.rollout.sleeping import Change, Sleeping
from services.rollout.states import ASLEEP, FAILED, READY, STALE, UPDATING, Life
from services.rollout.transfer_group import TransferGroup

logger = logging.getLogger(__name__)

LATE_SECONDS = 5.0
"""After the deadline that the workers keep; a socket that stands still keeps them from it."""


@dataclass(frozen=True)
class Probe:
    """A fixed sequence and what the trainer says of it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each token but the first, temperature 1."""
    tolerance: float
    """Largest mean absolute difference accepted."""


@dataclass(frozen=True)
class Committed:
    """What an update cost, and how far the probe was off."""

    transfer_seconds: float
    load_seconds: float
    pause_seconds: float
    probe_difference: float
    bytes: int
    probe_seconds: float
    extra_bytes: int
    kv_woken: Change | None
    """What waking keys and values did, where they slept."""


class Update:
    """One update that is open."""

    def __init__(self, epoch: int, version: int, deadline_seconds: float) -> None:
        self.epoch = epoch
        self.version = version
        self.held_since = time.monotonic()
        self.end = self.held_since + deadline_seconds
        self.watcher: asyncio.Task[None] | None = None
        self.received: Received | None = None
        self.failure: AntiphonError | None = None
        self.settled = asyncio.Event()
        """Set once `received` or `failure` is."""
        self.committing = asyncio.Event()


class Updates:
    """The one open update of an engine."""

    def __init__(
        self,
        engine: Engine,
        life: Life,
        gate: Gate,
        sleeping: Sleeping,
        group: TransferGroup,
        *,
        shares_gpus: bool,
        commit_seconds: float,
        probe_seconds: float,
    ) -> None:
        self._engine = engine
        self._life = life
        self._gate = gate
        self._sleeping = sleeping
        self._group = group
        self._shares_gpus = shares_gpus
        self._commit_seconds = commit_seconds
        self._probe_seconds = probe_seconds
        self._open: Update | None = None
        self._last: Update | None = None

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> Unmatched:
        """Makes the engine a member of the manifest's group, unless names do not match: then says which.

        Raises Conflict for an older epoch or one too far ahead, Unavailable when the others did not come. What the
        engine serves stays.
        """
        group = self._group
        group.require_follows(manifest.epoch)
        unmatched = await self._engine.unmatched(manifest)
        if unmatched:
            return unmatched
        if self._open is not None:
            await self._fail(self._open, Unavailable(f"given up: epoch {manifest.epoch} began"))
        group.epoch, group.joined = manifest.epoch, False
        await self._engine.join(manifest, first_receiver_rank, deadline_seconds=deadline_seconds)
        if group.epoch != manifest.epoch:
            raise Conflict(f"JoinTransfer: epoch {group.epoch} began while epoch {manifest.epoch} was being joined")
        group.joined = True
        return unmatched

    async def begin(self, epoch: int, version: int, *, deadline_seconds: float) -> None:
        """Holds new requests, waits until the engine is idle, and starts to receive.

        Raises Conflict when the group is not joined or broken, or the weights sleep; Expired when the engine was not
        idle in time.
        """
        if self._sleeping.busy or self._life.state == ASLEEP:
            raise Conflict(
                f"BeginUpdate to version {version}: the engine sleeps, or is on its way there or back; wake it"
            )
        if self._open is not None:
            newer = f"given up: another BeginUpdate, to version {version}, came"
            await self._fail(self._open, Unavailable(newer))
        if epoch != self._group.epoch or not self._group.joined:
            joined = f"epoch {self._group.epoch} {'is joined' if self._group.joined else 'was left or broke'}"
            raise Conflict(f"BeginUpdate: epoch {epoch} was asked for; {joined}. Join a new epoch first")
        update = Update(epoch, version, deadline_seconds)
        self._life.move(UPDATING, f"to version {version}")
        self._open = self._last = update
        try:
            await self._gate.idle(update.end - time.monotonic())
            if update.failure is not None:  # a newer epoch ended it meanwhile
                raise update.failure
            await self._engine.begin_receive(deadline_seconds=max(update.end - time.monotonic(), 0.001))
        except AntiphonError as error:
            await self._fail(update, error)
            raise
        except BaseException:
            await self._fail(update, Unavailable("BeginUpdate broke off"))
            raise
        if update.failure is not None:
            raise update.failure
        update.watcher = asyncio.create_task(self._watch(update), name=f"update to version {version}")

    async def commit(self, policy: Policy, probe: Probe) -> Committed:
        """Waits for the last bucket, verifies digest and names, loads, probes, and serves.

        Raises Conflict (no such update open; digest or probe differs) or Expired (the transfer broke or stalled); then
        the worker is STALE, with the version it had.
        """
        update = self._open
        if update is None:
            if self._last is not None and self._last.version == policy.version and self._last.failure is not None:
                raise self._last.failure
            raise Conflict(f"CommitUpdate: no update to version {policy.version} is open; begin one first")
        if update.version != policy.version:
            error = Conflict(f"CommitUpdate: version {policy.version}; the open update is to {update.version}")
            await self._fail(update, error)
            raise error
        if update.committing.is_set():
            raise Conflict(f"CommitUpdate: version {policy.version} is being committed by another request")
        update.committing.set()
        await update.settled.wait()
        if update.failure is not None:
            raise update.failure
        try:
            committed = await self._verified(update, policy, probe)
        except AntiphonError as error:
            await self._fail(update, error)
            raise
        except BaseException:
            await self._fail(update, Unavailable("CommitUpdate broke off; see the service's log"))
            raise
        if update.failure is not None:  # a newer epoch ended it while it was being loaded
            raise update.failure
        self._open = None
        self._life.move(READY, f"version {policy.version}", verified=policy)
        if self._shares_gpus:
            await self._leave_group()
        return committed

    async def close(self) -> None:
        """Gives up what is open and leaves the group."""
        if self._open is not None:
            await self._fail(self._open, Unavailable("the worker is stopping"))

    async def _verified(self, update: Update, policy: Policy, probe: Probe) -> Committed:
        received = update.received
        assert received is not None
        if received.digest != policy.digest:
            raise Conflict(
                f"version {policy.version}: the digest of what arrived is {received.digest:#018x}, the learner's is "
                f"{policy.digest:#018x}; nothing was loaded, publish again"
            )
        loading = time.monotonic()
        await self._engine.load(policy.version)
        load_seconds = time.monotonic() - loading
        if update.failure is not None:  # a newer epoch ended it, and the engine may be asleep by now
            raise update.failure
        kv_woken = await self._sleeping.wake_kv()
        probing = time.monotonic()
        ours = await self._probed(probe)
        probed = time.monotonic()
        difference = sum(abs(a - b) for a, b in zip(ours, probe.logprobs, strict=True)) / len(probe.logprobs)
        if not difference <= probe.tolerance:  # NaN is off, too
            raise Conflict(
                f"version {policy.version}: the probe's log-probabilities are off by {difference:.3g} in the mean, "
                f"{probe.tolerance:.3g} is allowed; the engine does not compute what the trainer does"
            )
        self._sleeping.committed(probe.token_ids, ours)
        return Committed(
            transfer_seconds=received.seconds,
            load_seconds=load_seconds,
            pause_seconds=time.monotonic() - update.held_since,
            probe_difference=difference,
            bytes=received.bytes,
            probe_seconds=probed - probing,
            extra_bytes=received.extra_bytes,
            kv_woken=kv_woken,
        )

    async def _probed(self, probe: Probe) -> list[float]:
        """The engine's own log-probabilities of the probe."""
        try:
            async with asyncio.timeout(self._probe_seconds):
                return await self._engine.probe(probe.token_ids)
        except TimeoutError:
            raise Expired(f"the probe was not answered within {self._probe_seconds:.0f} s") from None

    async def _watch(self, update: Update) -> None:
        try:
            async with asyncio.timeout(max(update.end - time.monotonic(), 0.0) + LATE_SECONDS):
                update.received = await self._engine.received()
        except TimeoutError:
            message = f"the transfer of version {update.version} was not given up at its deadline: it stands still"
            await self._fail(update, Expired(message))
            return
        except EngineDead as error:
            await self._fail(update, error)
            return
        except AntiphonError as error:
            await self._fail(update, Expired(f"the transfer of version {update.version} broke: {error}"))
            return
        except Exception:
            logger.exception("receiving version %d", update.version)
            await self._fail(update, Unavailable("receiving broke; see the service's log"))
            return
        update.settled.set()
        try:
            async with asyncio.timeout(self._commit_seconds):
                await update.committing.wait()
        except TimeoutError:
            message = f"version {update.version} has arrived, and nobody committed it in {self._commit_seconds:.0f} s"
            await self._fail(update, Expired(message))

    async def _fail(self, update: Update, error: AntiphonError) -> None:
        """Ends an update: the group is left, and nothing is served until the next one."""
        if self._open is not update:
            return
        self._open = None
        self._group.joined = False
        update.failure = error
        update.settled.set()
        if update.watcher is not None and update.watcher is not asyncio.current_task():
            update.watcher.cancel()
        if self._life.state == UPDATING:
            self._life.move(FAILED if isinstance(error, EngineDead) else STALE, str(error))
        await self._leave_group()

    async def _leave_group(self) -> None:
        try:
            await self._group.leave()
        except EngineDead:
            pass  # the watch on the engine says so
