"""Taking a policy: join a transfer group, hold requests, receive, verify, load, probe, serve.

    JoinTransfer ──► (group) ──► BeginUpdate ──► receiving ──► arrived ──► CommitUpdate ──► READY
                                     │              │             │             │
                                     └──────────────┴── any failure: STALE, group left, old version kept ◄┘

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
from services.rollout.states import FAILED, READY, STALE, UPDATING, Life

logger = logging.getLogger(__name__)


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
    """The one transfer group and the one open update of an engine."""

    def __init__(self, engine: Engine, life: Life, gate: Gate, *, commit_seconds: float, probe_seconds: float) -> None:
        self._engine = engine
        self._life = life
        self._gate = gate
        self._commit_seconds = commit_seconds
        self._probe_seconds = probe_seconds
        self._epoch = -1
        self._joined = False
        self._open: Update | None = None
        self._last: Update | None = None

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> Unmatched:
        """Makes the engine a member of the manifest's group, unless names do not match: then says which.

        Raises Conflict for an older epoch, Unavailable when the others did not come. What the engine serves stays.
        """
        if manifest.epoch < self._epoch:
            raise Conflict(f"JoinTransfer: epoch {manifest.epoch} is over; this worker is in epoch {self._epoch}")
        unmatched = await self._engine.unmatched(manifest)
        if unmatched:
            return unmatched
        if self._open is not None:
            await self._fail(self._open, Unavailable(f"given up: epoch {manifest.epoch} began"))
        self._epoch, self._joined = manifest.epoch, False
        await self._engine.join(manifest, first_receiver_rank, deadline_seconds=deadline_seconds)
        if self._epoch != manifest.epoch:
            raise Conflict(f"JoinTransfer: epoch {self._epoch} began while epoch {manifest.epoch} was being joined")
        self._joined = True
        return unmatched

    async def begin(self, epoch: int, version: int, *, deadline_seconds: float) -> None:
        """Holds new requests, waits until the engine is idle, and starts to receive.

        Raises Conflict when the group is not joined or broken, Expired when the engine was not idle in time.
        """
        if self._open is not None:
            newer = f"given up: another BeginUpdate, to version {version}, came"
            await self._fail(self._open, Unavailable(newer))
        if epoch != self._epoch or not self._joined:
            joined = f"epoch {self._epoch} {'is joined' if self._joined else 'was left or broke'}"
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
        difference = await self._probe_difference(probe)
        if not difference <= probe.tolerance:  # NaN is off, too
            raise Conflict(
                f"version {policy.version}: the probe's log-probabilities are off by {difference:.3g} in the mean, "
                f"{probe.tolerance:.3g} is allowed; the engine does not compute what the trainer does"
            )
        return Committed(
            transfer_seconds=received.seconds,
            load_seconds=load_seconds,
            pause_seconds=time.monotonic() - update.held_since,
            probe_difference=difference,
            bytes=received.bytes,
        )

    async def _probe_difference(self, probe: Probe) -> float:
        try:
            ours = await asyncio.wait_for(self._engine.probe(probe.token_ids), self._probe_seconds)
        except TimeoutError:
            raise Expired(f"the probe was not answered within {self._probe_seconds:.0f} s") from None
        return sum(abs(a - b) for a, b in zip(ours, probe.logprobs, strict=True)) / len(probe.logprobs)

    async def _watch(self, update: Update) -> None:
        try:
            update.received = await self._engine.received()
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
            await asyncio.wait_for(update.committing.wait(), self._commit_seconds)
        except TimeoutError:
            message = f"version {update.version} has arrived, and nobody committed it in {self._commit_seconds:.0f} s"
            await self._fail(update, Expired(message))

    async def _fail(self, update: Update, error: AntiphonError) -> None:
        """Ends an update: the group is left, the model keeps what it has, and nothing is served until the next one."""
        if self._open is not update:
            return
        self._open = None
        self._joined = False
        update.failure = error
        update.settled.set()
        if update.watcher is not None and update.watcher is not asyncio.current_task():
            update.watcher.cancel()
        if self._life.state == UPDATING:
            self._life.move(FAILED if isinstance(error, EngineDead) else STALE, str(error))
        try:
            await self._engine.give_up_receive()
        except EngineDead:
            pass  # the watch on the engine says so
