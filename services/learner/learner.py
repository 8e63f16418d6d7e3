"""The learner of one model: which version it is, which Steps were applied, which transfer epoch it is in.

It outlives its ranks. Everything that can be said without them, or after they are lost, is said here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, policy_pb2, transfer_pb2

from services.common.errors import AntiphonError, Conflict, Expired, InvalidRequest, Unavailable
from services.common.operations import Operation, Operations, Report
from services.common.tenancy import TenantGuard
from services.learner.batch_checks import check_step
from services.learner.checkpoints import LearnerCheckpoints
from services.learner.history import History, settings_of
from services.learner.memory import OPTIMIZER, WEIGHTS, LearnerMemory
from services.learner.ranks import Ranks

LONGEST_DEADLINE_SECONDS = 7 * 24 * 3600.0
MOST_RECEIVER_RANKS = 4096
"""What a rank makes of more (a timeout that does not fit its type, a table of all peers) would be its end."""
TRANSPORTS = (transfer_pb2.TRANSPORT_GLOO, transfer_pb2.TRANSPORT_NCCL, transfer_pb2.TRANSPORT_CUDA_IPC)
DRY_RUNS_REMEMBERED = 4
LATE_SECONDS = 3.0
"""After the deadline of a publication, which each rank keeps by itself, and which leaves it the probe to compute."""


class _Epoch:
    """One transfer group: asked for, described, then connected in the background, then perhaps broken."""

    def __init__(self, request: learner_pb2.JoinTransferRequest) -> None:
        self.request = request
        self.manifest: asyncio.Future[transfer_pb2.TransferManifest] = asyncio.get_running_loop().create_future()
        self.connected: asyncio.Task[None] | None = None
        self.broken: str | None = None

    def break_off(self, error: AntiphonError) -> None:
        """From now on this epoch is of no use, and here is why."""
        self.broken = str(error)
        if not self.manifest.done():
            self.manifest.set_exception(error)
            self.manifest.exception()  # nobody may be waiting


class Learner:
    """Serialises the work of the ranks, and remembers. All methods run in one event loop."""

    def __init__(self, ranks: Ranks, guard: TenantGuard, on_change: Callable[[], None] = lambda: None) -> None:
        self._ranks = ranks
        self._guard = guard
        self._turn = asyncio.Lock()  # first come, first served
        self.memory = LearnerMemory(ranks, self._turn, guard, on_change)
        self._history = History()
        self.checkpoints = LearnerCheckpoints(ranks, self._turn, self.memory, self._history, self._other_policy)
        self._dry_runs: Operations[learner_pb2.StepResult] = Operations("dry run", keep=DRY_RUNS_REMEMBERED)
        self._publications: Operations[learner_pb2.PublishResult] = Operations("publication")
        self._exports: Operations[learner_pb2.ExportResult] = Operations("export")
        self._epoch: _Epoch | None = None

    @property
    def policy(self) -> policy_pb2.Policy:
        """The current one; its digest is known after a publication, a Save or a Load."""
        return self._history.policy

    @property
    def problem(self) -> str | None:
        """What keeps it from working; None when it works."""
        return self._ranks.problem

    async def forward(
        self, header: learner_pb2.ForwardHeader, sequences: Sequence[learner_pb2.Sequence]
    ) -> list[learner_pb2.ForwardResponse]:
        """Log-probs under the current policy, in the order asked."""
        longest = self._ranks.hello.max_sequence_tokens
        if not 0.0 < header.temperature < float("inf"):
            raise InvalidRequest(f"forward: temperature {header.temperature}; expected one above 0")
        seen: set[str] = set()
        for sequence in sequences:
            if sequence.id in seen:
                raise InvalidRequest(f"forward: sequence {sequence.id} came twice")
            if not 0 < len(sequence.token_ids) <= longest:
                count = len(sequence.token_ids)
                raise InvalidRequest(f"forward: sequence {sequence.id}: {count} tokens; expected 1 to {longest}")
            seen.add(sequence.id)
        if not sequences:
            return []
        async with self._turn:
            self.memory.require("forward", WEIGHTS)
            work = ranks_pb2.RankForward(header=header, sequences=sequences)
            reply = await self._ranks.run(ranks_pb2.RankCommand(forward=work))
            for response in reply.forward.responses:
                response.policy.CopyFrom(self._history.policy)
            return list(reply.forward.responses)

    async def encode(self, conversations: Sequence[chat_pb2.Conversation]) -> list[chat_pb2.TokenIds]:
        async with self._turn:
            work = ranks_pb2.RankEncode(conversations=conversations)
            reply = await self._ranks.run(ranks_pb2.RankCommand(encode=work))
            return list(reply.encode.encoded)

    async def train_step(
        self, header: learner_pb2.StepHeader, trajectories: Sequence[learner_pb2.TrainTrajectory]
    ) -> Operation[learner_pb2.StepResult]:
        """Begins the Step, or attaches to the one of that id. Raises InvalidRequest, Conflict.

        Its work goes on whatever becomes of the caller; its result is remembered (services/learner/history.py).
        """
        longest = self._ranks.hello.max_sequence_tokens
        # Large batches: the loop must go on answering while this one is checked.
        await asyncio.to_thread(check_step, header, trajectories, longest)
        command = ranks_pb2.RankCommand(train_step=ranks_pb2.RankTrainStep(header=header, trajectories=trajectories))

        async def work(report: Report) -> learner_pb2.StepResult:
            async with self._turn:
                self._history.require_next(header.step_id)
                self.memory.require(f"step {header.step_id}", WEIGHTS, OPTIMIZER)
                reply = await self._ranks.run(command, report)
                reply.step.policy.CopyFrom(self._history.applied(header.step_id))
                return reply.step

        async def dry_run(report: Report) -> learner_pb2.StepResult:
            async with self._turn:
                self._history.require_next(header.step_id)
                self.memory.require(f"dry run of step {header.step_id}", WEIGHTS, OPTIMIZER)
                replies = await self._ranks.run_all(command, report)
                step = replies[0].step
                step.policy.CopyFrom(self._history.policy)
                for other in replies[1:]:
                    step.peaks.extend(other.step.peaks)
                return step

        if header.dry_run:
            return self._dry_runs.start_or_attach(str(header.step_id), settings_of(header), dry_run)
        return self._history.step(header, work)

    async def join_transfer(self, request: learner_pb2.JoinTransferRequest) -> transfer_pb2.TransferManifest:
        """Enters the epoch and answers how to join it; the ranks wait for the receivers in the background.

        A failure of that is told by `publish`. Raises Conflict for an older epoch, or this one with other settings.
        """
        _ = self._ranks.hello
        self.memory.require(f"epoch {request.epoch}", WEIGHTS)
        if (
            not 1 <= request.receiver_ranks <= MOST_RECEIVER_RANKS
            or min(request.bucket_bytes, request.deadline_seconds) <= 0
        ):
            raise InvalidRequest(
                f"epoch {request.epoch}: receiver_ranks {request.receiver_ranks}, bucket_bytes {request.bucket_bytes}, "
                f"deadline_seconds {request.deadline_seconds}; expected all above 0, "
                f"and at most {MOST_RECEIVER_RANKS} ranks"
            )
        _check_deadline(f"epoch {request.epoch}", request.deadline_seconds)
        if request.transport not in TRANSPORTS:
            raise InvalidRequest(f"epoch {request.epoch}: transport {request.transport}; expected one of {TRANSPORTS}")
        now = self._epoch
        if now is not None and request.epoch < now.request.epoch:
            raise Conflict(f"epoch {request.epoch} is over: this learner is in epoch {now.request.epoch}")
        if now is None or request.epoch > now.request.epoch:
            if now is not None and now.connected is not None:
                now.connected.cancel()
            now = self._epoch = _Epoch(request)
            now.connected = asyncio.create_task(self._enter(now))
        elif settings_of(request) != settings_of(now.request):
            raise Conflict(f"epoch {request.epoch}: joined before with other settings; use a new epoch")
        return await asyncio.shield(now.manifest)

    async def _enter(self, epoch: _Epoch) -> None:
        begin = time.monotonic()
        try:
            async with self._turn:
                work = ranks_pb2.RankJoinTransfer(request=epoch.request)
                reply = await self._ranks.run(ranks_pb2.RankCommand(join_transfer=work))
            epoch.manifest.set_result(reply.manifest)
            connect = ranks_pb2.RankConnectTransfer(
                manifest=reply.manifest,
                deadline_seconds=max(epoch.request.deadline_seconds - (time.monotonic() - begin), 0.001),
            )
            await self._ranks.run(ranks_pb2.RankCommand(connect_transfer=connect))
        except AntiphonError as error:
            epoch.break_off(error)
        except asyncio.CancelledError:
            epoch.break_off(Conflict(f"epoch {epoch.request.epoch} is over: a newer one began"))
            raise

    def publish(self, request: learner_pb2.PublishRequest) -> Operation[learner_pb2.PublishResult]:
        """Begins to send the current policy over the connected group, or attaches to that request."""
        _ = self._ranks.hello
        _check_deadline(f"publish version {request.policy_version}", request.deadline_seconds)
        return self._publications.start_or_attach(
            request.request_id, settings_of(request), lambda report: self._publish(request, report)
        )

    async def _publish(self, request: learner_pb2.PublishRequest, report: Report) -> learner_pb2.PublishResult:
        end = time.monotonic() + request.deadline_seconds
        epoch = self._current_epoch(request.epoch)
        report("connecting", 0, 0)
        assert epoch.connected is not None
        done, _ = await asyncio.wait({epoch.connected}, timeout=request.deadline_seconds)
        if not done:
            raise Expired(f"epoch {request.epoch}: not every receiver came within {request.deadline_seconds:.0f} s")
        async with self._turn:
            epoch = self._current_epoch(request.epoch)
            if epoch.broken is not None:
                raise Unavailable(f"epoch {request.epoch} cannot be used any more, make a new one: {epoch.broken}")
            if request.policy_version != self._history.version:
                raise Conflict(f"publish version {request.policy_version}: the policy is at {self._history.version}")
            self.memory.require(f"publish version {request.policy_version}", WEIGHTS)
            ours = learner_pb2.PublishRequest()
            ours.CopyFrom(request)
            ours.deadline_seconds = end - time.monotonic()
            if ours.deadline_seconds <= 0:
                raise Expired(f"publish version {request.policy_version}: the deadline passed before its turn came")
            try:
                async with asyncio.timeout(ours.deadline_seconds + LATE_SECONDS):
                    reply = await self._ranks.run(
                        ranks_pb2.RankCommand(publish=ranks_pb2.RankPublish(request=ours)), report
                    )
            except TimeoutError:
                error = Expired(
                    f"publish version {request.policy_version}: a rank said nothing at its deadline of "
                    f"{ours.deadline_seconds:.1f} s: it stands still; the ranks' logs say how far each came"
                )
                epoch.break_off(error)
                raise error from None
            except AntiphonError as error:
                epoch.break_off(error)
                raise
            self._history.know_digest(reply.publish.policy.digest)
            reply.publish.policy.CopyFrom(self._history.policy)
            return reply.publish

    def _current_epoch(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.request.epoch != number:
            current = "in none" if self._epoch is None else f"in epoch {self._epoch.request.epoch}"
            raise Conflict(f"epoch {number}: this learner is {current}; join first")
        return self._epoch

    def export(self, request: learner_pb2.ExportRequest) -> Operation[learner_pb2.ExportResult]:
        """Begins to write the current policy to a new folder, or attaches to that request."""
        _ = self._ranks.hello
        if not Path(request.path).is_absolute() or "\0" in request.path:
            raise InvalidRequest(f"export to {request.path!r}: expected an absolute path")

        async def work(report: Report) -> learner_pb2.ExportResult:
            async with self._turn:
                self.memory.require(f"export to {request.path}", WEIGHTS)
                reply = await self._ranks.run(
                    ranks_pb2.RankCommand(export=ranks_pb2.RankExport(request=request)), report
                )
                reply.export.policy.CopyFrom(self._history.policy)
                return reply.export

        return self._exports.start_or_attach(request.request_id, settings_of(request), work)

    def _other_policy(self) -> None:
        """A checkpoint was loaded: what was published and tried is no answer any more."""
        self._publications = Operations("publication")
        self._dry_runs = Operations("dry run", keep=DRY_RUNS_REMEMBERED)

    async def state(self) -> tenant_pb2.GetStateResponse:
        """What `describe` says, and what the ranks' GPUs hold, read there now."""
        state = self.describe()
        if state.state in (tenant_pb2.WORKER_STATE_READY, tenant_pb2.WORKER_STATE_ASLEEP):
            with suppress(Unavailable):  # the rest is known without them
                state.devices.extend(await self.memory.devices())
        return state

    def describe(self) -> tenant_pb2.GetStateResponse:
        """State, policy and children, as they are now; also before the ranks are up and after they are lost."""
        state = tenant_pb2.GetStateResponse(
            policy=self._history.policy,
            pids=[os.getpid(), *self._ranks.pids],
            transfer_ranks=self._ranks.count,
            asleep=self.memory.asleep,
            shares_gpus=self._guard.shares_gpus,
            token=self._guard.token,
        )
        try:
            hello = self._ranks.hello
        except Unavailable:
            is_lost = self._ranks.is_lost
            state.state = tenant_pb2.WORKER_STATE_FAILED if is_lost else tenant_pb2.WORKER_STATE_STARTING
            return state
        state.state = tenant_pb2.WORKER_STATE_ASLEEP if self.memory.asleep else tenant_pb2.WORKER_STATE_READY
        state.backend, state.dtype = hello.backend, hello.dtype
        state.max_sequence_tokens = hello.max_sequence_tokens
        return state


def _check_deadline(what: str, seconds: float) -> None:
    """One that has passed is no mistake; one that no clock can hold is."""
    if not seconds <= LONGEST_DEADLINE_SECONDS:  # NaN is off, too
        raise InvalidRequest(f"{what}: deadline_seconds {seconds}; expected at most {LONGEST_DEADLINE_SECONDS:.0f}")
