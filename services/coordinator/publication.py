"""Publication: one policy from the learner to every engine, verified by its effect (docs/design.md §6).

    learner.JoinTransfer → engines JoinTransfer, all at once     once per epoch; an unmatched tensor ends the run
    engines BeginUpdate → learner.Publish ∥ engines receive → engines CommitUpdate(policy, probe)
    → engines GetState: the version and digest that the learner said

An engine is in routing only after the last line. Any failure makes a new epoch over the engines that are alive, and the
same version is tried once more. An engine that comes up beside others gets the version that they serve in an epoch of
its own; they go on. Where GPUs are shared every publication has an epoch of its own: what a group holds of
them is left when either side sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from antiphon.learner.v1 import learner_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2, policy_pb2, transfer_pb2

from services.common.client import new_request_id
from services.common.errors import AntiphonError, Conflict, InvalidRequest, Unavailable
from services.coordinator.clients import LearnerClient, OnProgress, RolloutClient
from services.coordinator.config import PublicationConfig
from services.coordinator.waits import together
from services.coordinator.workers import Life, Workers, life_of

logger = logging.getLogger(__name__)

TRIES = 2
_TRANSPORTS = {
    "gloo": transfer_pb2.TRANSPORT_GLOO,
    "nccl": transfer_pb2.TRANSPORT_NCCL,
    "cuda_ipc": transfer_pb2.TRANSPORT_CUDA_IPC,
}
_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2}
# A call outlasts the deadline that it carries, so that the worker's own error is the one shown.
CALL_MARGIN_SECONDS = 5.0

Tokens: TypeAlias = Mapping[str, grant_pb2.GrantToken]
"""Worker id → the grant under which it is called."""


@dataclass(frozen=True)
class Published:
    """What a publication did, for metrics."""

    policy: policy_pb2.Policy
    engines: int
    bytes: int
    transfer_seconds: float
    load_seconds: float
    probe_seconds: float
    pause_seconds: float
    """The longest time for which an engine held requests; the others are parts of it, each the longest of its kind."""
    extra_bytes: int
    """Most memory of one GPU that the transfer took at an engine beyond the model."""
    probe_difference: float
    """The largest over the engines."""


class Unmatched(InvalidRequest):
    """Learner and engine do not have the same tensors: no retry helps."""


class Publication:
    """Publishes policies, and keeps the membership epoch between them."""

    def __init__(
        self,
        workers: Workers,
        config: PublicationConfig,
        dtype: str,
        on_retry: Callable[[str], None] | None = None,
        *,
        after_epoch: int = 0,
        on_epoch: Callable[[int], Awaitable[None]] | None = None,
        find_learner: Callable[[], Awaitable[LearnerClient]] | None = None,
    ) -> None:
        """Epochs begin after `after_epoch`: workers refuse those that are not above what they have seen.

        `on_epoch` is told each before any worker is. `find_learner` answers the learner, holding the policy of the run;
        default: the one that is there.
        """
        self._workers = workers
        self._config = config
        self._tolerance = config.probe_tolerance or _PROBE_TOLERANCES[dtype]
        self._on_retry = on_retry
        self._epoch = after_epoch
        self._on_epoch = on_epoch
        self._find_learner = find_learner
        # The learner and the engines of the epoch that is joined; empty where none is.
        self._members: list[Life] = []
        self.published: policy_pb2.Policy | None = None
        """What the engines in routing serve."""

    async def adopt(self, policy: policy_pb2.Policy) -> list[RolloutClient]:
        """Puts the engines into routing that serve this very policy already, by digest; answers the others.

        For a coordinator that was started again. Without a digest, which a publication makes, nobody is.
        """
        engines = self._workers.rollouts()
        states = await asyncio.gather(*(engine.state() for engine in engines), return_exceptions=True)
        wanted = (policy.version, policy.digest)
        serving = [
            engine
            for engine, state in zip(engines, states, strict=True)
            if policy.digest
            and not isinstance(state, BaseException)
            and state.state == tenant_pb2.WORKER_STATE_READY
            and (state.policy.version, state.policy.digest) == wanted
        ]
        self._workers.serve(serving)
        if serving:
            self.published = policy
        return [engine for engine in engines if engine not in serving]

    async def publish(
        self,
        version: int,
        on_progress: OnProgress | None = None,
        tokens: Tokens | None = None,
        *,
        only: Sequence[RolloutClient] | None = None,
    ) -> Published:
        """Brings every engine that is alive to this version, the learner's current one; or `only` these, beside others
        that serve it already.

        `tokens` is for workers that share their GPUs: weights of both sides are awake under them.

        Raises Unmatched naming every tensor that does not fit; else the first error when the second try failed too.
        """
        first: AntiphonError | None = None
        for _ in range(TRIES):
            try:
                engines = only or await self._engines(answering=first is not None)
                if not engines:
                    raise first or Unavailable("publication: no rollout worker is alive")
                published = await self._try(engines, version, on_progress, tokens or {})
                self.published = published.policy
                return published
            except Unmatched:
                raise
            except AntiphonError as error:
                self._members = []
                if first is not None:
                    break
                first = error
                logger.warning("publication of version %d broke, epoch %d: %s", version, self._epoch, error)
                if self._on_retry is not None:
                    self._on_retry(f"publication of version {version} broke and is tried again: {error}")
        assert first is not None
        raise first

    async def _engines(self, *, answering: bool) -> list[RolloutClient]:
        """The engines that announce themselves; after a failure only those that answer now: the others may be dead."""
        engines = self._workers.rollouts()
        if not answering:
            return engines
        states = await asyncio.gather(*(engine.state() for engine in engines), return_exceptions=True)
        return [
            engine
            for engine, state in zip(engines, states, strict=True)
            if not isinstance(state, BaseException) and state.state != tenant_pb2.WORKER_STATE_FAILED
        ]

    async def _try(
        self, engines: Sequence[RolloutClient], version: int, on_progress: OnProgress | None, tokens: Tokens
    ) -> Published:
        learner = await self._find_learner() if self._find_learner else self._workers.learner()
        self._workers.routing -= {life_of(engine) for engine in engines}
        if tokens or self._members != [life_of(client) for client in (learner, *engines)]:
            await self._join(learner, engines, tokens)
        seconds = self._config.deadline_seconds
        bound = seconds + CALL_MARGIN_SECONDS
        await together([self._begin(engine, version, tokens) for engine in engines])
        request = learner_pb2.PublishRequest(
            request_id=new_request_id(),
            epoch=self._epoch,
            policy_version=version,
            deadline_seconds=seconds,
            token=tokens.get(learner.worker_id),
        )
        result = await learner.publish(request, bound, on_progress)
        if result.policy.version != version or not result.policy.digest:
            raise Conflict(
                f"{learner.worker_id}: expected to publish version {version} with its digest, it says version "
                f"{result.policy.version}, digest {result.policy.digest:016x}"
            )
        commits = await together([self._commit(engine, result, tokens) for engine in engines])
        await together([_verify(engine, result.policy) for engine in engines])
        self._workers.serve(engines)
        return Published(
            policy=result.policy,
            engines=len(engines),
            bytes=result.bytes,
            transfer_seconds=max(commit.transfer_seconds for commit in commits),
            load_seconds=max(commit.load_seconds for commit in commits),
            probe_seconds=max(commit.probe_seconds for commit in commits),
            extra_bytes=max(commit.extra_bytes for commit in commits),
            pause_seconds=max(commit.pause_seconds for commit in commits),
            probe_difference=max(commit.probe_difference for commit in commits),
        )

    async def _join(self, learner: LearnerClient, engines: Sequence[RolloutClient], tokens: Tokens) -> None:
        """Makes the group of the next epoch over the learner's ranks and all ranks of these engines."""
        self._members = []
        self._epoch += 1
        if self._on_epoch is not None:
            await self._on_epoch(self._epoch)
        seconds = self._config.deadline_seconds
        bound = seconds + CALL_MARGIN_SECONDS
        ours, *states = await together([learner.state(), *(engine.state() for engine in engines)])
        transport = choose_transport(self._config.transport, ours, states)
        firsts = [sum(state.transfer_ranks for state in states[:n]) for n in range(len(states) + 1)]
        manifest = await learner.join_transfer(
            learner_pb2.JoinTransferRequest(
                request_id=new_request_id(),
                epoch=self._epoch,
                transport=transport,
                receiver_ranks=firsts[-1],
                bucket_bytes=self._config.bucket_mib << 20,
                deadline_seconds=seconds,
                token=tokens.get(learner.worker_id),
            ),
            bound,
        )
        joins = [
            engine.join_transfer(
                rollout_pb2.JoinTransferRequest(
                    request_id=new_request_id(),
                    manifest=manifest,
                    first_receiver_rank=first,
                    token=tokens.get(engine.worker_id),
                ),
                bound,
            )
            for engine, first in zip(engines, firsts, strict=False)
        ]
        _refuse_unmatched(engines, await together(joins))
        self._members = [life_of(client) for client in (learner, *engines)]

    def _begin(self, engine: RolloutClient, version: int, tokens: Tokens) -> Coroutine[Any, Any, None]:
        seconds = self._config.deadline_seconds
        request = rollout_pb2.BeginUpdateRequest(
            request_id=new_request_id(),
            epoch=self._epoch,
            policy_version=version,
            deadline_seconds=seconds,
            token=tokens.get(engine.worker_id),
        )
        return engine.begin_update(request, seconds + CALL_MARGIN_SECONDS)

    def _commit(
        self, engine: RolloutClient, result: learner_pb2.PublishResult, tokens: Tokens
    ) -> Coroutine[Any, Any, rollout_pb2.CommitUpdateResponse]:
        request = rollout_pb2.CommitUpdateRequest(
            request_id=new_request_id(),
            policy=result.policy,
            probe_token_ids=result.probe_token_ids,
            probe_logprobs=result.probe_logprobs,
            probe_tolerance=self._tolerance,
            token=tokens.get(engine.worker_id),
        )
        return engine.commit_update(request, self._config.deadline_seconds + CALL_MARGIN_SECONDS)


def choose_transport(
    wanted: str, learner: tenant_pb2.GetStateResponse, engines: Sequence[tenant_pb2.GetStateResponse]
) -> transfer_pb2.Transport:
    """What carries the weights: what the configuration says, or for "auto" what fits the devices.

    gloo where nobody is on a GPU; CUDA IPC where two of them are on one GPU, since NCCL refuses two ranks of a group
    there; NCCL else. Raises InvalidRequest where some are on GPUs and some are not.
    """
    if wanted != "auto":
        return _TRANSPORTS[wanted]
    gpus = [{device.uuid for device in state.devices} for state in (learner, *engines)]
    if not any(gpus):
        return transfer_pb2.TRANSPORT_GLOO
    if not all(gpus):
        raise InvalidRequest(
            f"learner and engines: {sum(map(bool, gpus))} of {len(gpus)} are on GPUs, the others on CPU; "
            "no transport carries weights between the two"
        )
    if any(one & other for one, other in itertools.combinations(gpus, 2)):
        return transfer_pb2.TRANSPORT_CUDA_IPC
    return transfer_pb2.TRANSPORT_NCCL


async def _verify(engine: RolloutClient, policy: policy_pb2.Policy) -> None:
    """The effect, not the status code: what the engine itself says it holds."""
    state = await engine.state()
    if (state.policy.version, state.policy.digest) != (policy.version, policy.digest):
        raise Conflict(
            f"{engine.worker_id}: expected version {policy.version} with digest {policy.digest:016x} after the "
            f"commit, it holds version {state.policy.version} with digest {state.policy.digest:016x}"
        )


def _refuse_unmatched(engines: Sequence[RolloutClient], answers: Sequence[rollout_pb2.JoinTransferResponse]) -> None:
    lines = []
    for engine, answer in zip(engines, answers, strict=True):
        lines += [f"{engine.worker_id}: no place for {name}" for name in answer.unknown_tensors]
        lines += [f"{engine.worker_id}: nothing fills {name}" for name in answer.missing_tensors]
        lines += [f"{engine.worker_id}: {difference}" for difference in answer.differing_tensors]
    if lines:
        raise Unmatched(
            "\n".join([f"learner and engines differ in {len(lines)} tensor(s):", *(f"  {x}" for x in lines)])
        )
