"""The other services as the coordinator calls them: a method per RPC, each with a deadline, errors name the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc
from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, policy_pb2, progress_pb2, trajectory_pb2, transfer_pb2

from services.common.client import Peer
from services.common.errors import AntiphonError, Internal, Unavailable
from services.coordinator.waits import few_tries

# For calls that answer from memory.
SHORT_SECONDS = 10.0
# The contract promises a message at least every 5 s; a busy machine may be late with it.
SILENCE_SECONDS = 60.0

OnProgress = Callable[[progress_pb2.Progress], None]


class _Client:
    """One worker, and one life of it (instance id)."""

    def __init__(self, worker_id: str, instance_id: str, address: str) -> None:
        self.worker_id = worker_id
        self.instance_id = instance_id
        self.in_flight = 0
        self._peer = Peer(worker_id, address)

    async def close(self) -> None:
        await self._peer.close()

    async def _call(self, method: Any, request: Any, seconds: float) -> Any:
        return await self._peer.call(method, request, deadline_seconds=seconds)

    def _stream(self, method: Any, request: Any, seconds: float) -> AsyncGenerator[Any, None]:
        return self._peer.stream(method, request, deadline_seconds=seconds)

    async def _result(
        self, method: Any, make_request: Callable[[], Any], seconds: float, on_progress: OnProgress | None
    ) -> Any:
        """The result of a long call: tells its progress, attaches again where the connection broke, minds silence."""

        async def attempt() -> Any:
            async with aclosing(self._stream(method, make_request(), seconds)) as answers:
                while True:
                    try:
                        async with asyncio.timeout(SILENCE_SECONDS):
                            answer = await anext(answers, None)
                    except TimeoutError:
                        raise self._mine(Unavailable(f"no sign of progress for {SILENCE_SECONDS:.0f} s")) from None
                    if answer is None:
                        raise self._mine(Internal("the call ended without its result"))
                    if answer.WhichOneof("part") == "result":
                        return answer.result
                    if on_progress is not None:
                        on_progress(answer.progress)

        return await few_tries(attempt)

    def _mine(self, error: AntiphonError) -> AntiphonError:
        named = type(error)(f"{self.worker_id}: {error}")
        named.worker_id = self.worker_id
        return named


class TenantClient(_Client):
    """One worker that holds a model."""

    def __init__(self, worker_id: str, instance_id: str, address: str) -> None:
        super().__init__(worker_id, instance_id, address)
        self._tenant = tenant_pb2_grpc.TenantServiceStub(self._peer.channel)

    async def state(self) -> tenant_pb2.GetStateResponse:
        answer: tenant_pb2.GetStateResponse = await self._call(
            self._tenant.GetState, tenant_pb2.GetStateRequest(), SHORT_SECONDS
        )
        return answer

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse:
        answer: tenant_pb2.SleepResponse = await self._call(self._tenant.Sleep, request, deadline_seconds)
        return answer

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse:
        answer: tenant_pb2.WakeResponse = await self._call(self._tenant.Wake, request, deadline_seconds)
        return answer


class RolloutClient(TenantClient):
    """One rollout worker."""

    def __init__(self, worker_id: str, instance_id: str, address: str) -> None:
        super().__init__(worker_id, instance_id, address)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._peer.channel)

    async def generate(
        self, request: rollout_pb2.GenerateRequest, deadline_seconds: float
    ) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
        """Trajectories as they finish. Leaving the loop (aclose) aborts what is unfinished."""
        async with aclosing(self._stream(self._stub.Generate, request, deadline_seconds)) as answers:
            async for answer in answers:
                yield answer.trajectory

    async def acknowledge(self, request_id: str, deadline_seconds: float) -> None:
        """All that a Generate call of this id has delivered is safe: the worker may forget it."""
        calls = [rollout_pb2.AcknowledgedCall(request_id=request_id)]
        await self._call(self._stub.Acknowledge, rollout_pb2.AcknowledgeRequest(calls=calls), deadline_seconds)

    async def encode(self, conversations: Sequence[chat_pb2.Conversation], deadline_seconds: float) -> list[list[int]]:
        request = rollout_pb2.EncodeRequest(conversations=conversations)
        answer = await self._call(self._stub.Encode, request, deadline_seconds)
        return [list(encoded.ids) for encoded in answer.encoded]

    async def join_transfer(
        self, request: rollout_pb2.JoinTransferRequest, deadline_seconds: float
    ) -> rollout_pb2.JoinTransferResponse:
        answer: rollout_pb2.JoinTransferResponse = await self._call(self._stub.JoinTransfer, request, deadline_seconds)
        return answer

    async def begin_update(self, request: rollout_pb2.BeginUpdateRequest, deadline_seconds: float) -> None:
        await self._call(self._stub.BeginUpdate, request, deadline_seconds)

    async def commit_update(
        self, request: rollout_pb2.CommitUpdateRequest, deadline_seconds: float
    ) -> rollout_pb2.CommitUpdateResponse:
        answer: rollout_pb2.CommitUpdateResponse = await self._call(self._stub.CommitUpdate, request, deadline_seconds)
        return answer


class RewardClient(_Client):
    """One reward worker."""

    def __init__(self, worker_id: str, instance_id: str, address: str) -> None:
        super().__init__(worker_id, instance_id, address)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._peer.channel)

    async def list_scorers(self) -> list[reward_pb2.ScorerInfo]:
        answer = await self._call(self._stub.ListScorers, reward_pb2.ListScorersRequest(), SHORT_SECONDS)
        return list(answer.scorers)

    async def reference_info(self) -> reward_pb2.ReferenceInfo | None:
        """What its frozen reference model is; None where it has none, or is still loading it."""
        answer = await self._call(self._stub.ListScorers, reward_pb2.ListScorersRequest(), SHORT_SECONDS)
        return answer.reference if answer.HasField("reference") else None

    async def reference_logprobs(
        self,
        sequences: dict[str, Sequence[int]],
        temperature: float,
        deadline_seconds: float,
        tokenizer_digest: bytes = b"",
    ) -> dict[str, list[float]]:
        """Log-probabilities of each sequence under the reference model, by id: one per token, 0 for the first.

        With the digest of the vocabulary that the ids are of (services/common/digest.py) a reference model with another
        one is a Conflict.
        """
        header = reward_pb2.ReferenceHeader(temperature=temperature, tokenizer_digest=tokenizer_digest)
        rows = (
            reward_pb2.ReferenceLogProbsRequest(sequence=reward_pb2.ReferenceSequence(id=name, token_ids=ids))
            for name, ids in sequences.items()
        )
        parts = _each([reward_pb2.ReferenceLogProbsRequest(header=header)], rows)
        async with aclosing(self._stream(self._stub.ReferenceLogProbs, parts, deadline_seconds)) as answers:
            found = {answer.id: list(answer.logprobs) async for answer in answers}
        if found.keys() != sequences.keys():
            missing = [name for name in sequences if name not in found]
            raise self._mine(Internal(f"the stream ended with {len(missing)} sequences unanswered: {missing[:3]}"))
        return found

    async def score(
        self, requests: Sequence[reward_pb2.ScoreRequest], deadline_seconds: float
    ) -> list[reward_pb2.ScoreResponse]:
        """Every answer of the stream, in the order of arrival."""
        stream = self._stream(self._stub.Score, _each(requests), deadline_seconds)
        async with aclosing(stream) as answers:
            return [answer async for answer in answers]


class LearnerClient(TenantClient):
    """The learner of one model role."""

    def __init__(self, worker_id: str, instance_id: str, address: str) -> None:
        super().__init__(worker_id, instance_id, address)
        self._stub = learner_pb2_grpc.LearnerServiceStub(self._peer.channel)

    async def encode(self, conversations: Sequence[chat_pb2.Conversation], deadline_seconds: float) -> list[list[int]]:
        request = learner_pb2.EncodeRequest(conversations=conversations)
        answer = await self._call(self._stub.Encode, request, deadline_seconds)
        return [list(encoded.ids) for encoded in answer.encoded]

    async def forward(
        self, sequences: dict[str, Sequence[int]], temperature: float, deadline_seconds: float
    ) -> dict[str, learner_pb2.ForwardResponse]:
        """Log-probabilities of each sequence, by id."""
        parts = [learner_pb2.ForwardRequest(header=learner_pb2.ForwardHeader(temperature=temperature))]
        for name, ids in sequences.items():
            parts.append(learner_pb2.ForwardRequest(sequence=learner_pb2.Sequence(id=name, token_ids=ids)))
        stream = self._stream(self._stub.Forward, _each(parts), deadline_seconds)
        async with aclosing(stream) as answers:
            return {answer.id: answer async for answer in answers}

    async def train_step(
        self,
        header: learner_pb2.StepHeader,
        trajectories: Sequence[learner_pb2.TrainTrajectory],
        deadline_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> learner_pb2.StepResult:
        """Applies the Batch once, however often the connection breaks: the step id is its name."""

        def request() -> AsyncIterator[learner_pb2.TrainStepRequest]:
            parts = (learner_pb2.TrainStepRequest(trajectory=trajectory) for trajectory in trajectories)
            return _each([learner_pb2.TrainStepRequest(header=header)], parts)

        result: learner_pb2.StepResult = await self._result(
            self._stub.TrainStep, request, deadline_seconds, on_progress
        )
        return result

    async def join_transfer(
        self, request: learner_pb2.JoinTransferRequest, deadline_seconds: float
    ) -> transfer_pb2.TransferManifest:
        answer = await self._call(self._stub.JoinTransfer, request, deadline_seconds)
        manifest: transfer_pb2.TransferManifest = answer.manifest
        return manifest

    async def publish(
        self, request: learner_pb2.PublishRequest, deadline_seconds: float, on_progress: OnProgress | None = None
    ) -> learner_pb2.PublishResult:
        result: learner_pb2.PublishResult = await self._result(
            self._stub.Publish, lambda: request, deadline_seconds, on_progress
        )
        return result

    async def export(
        self, request: learner_pb2.ExportRequest, deadline_seconds: float, on_progress: OnProgress | None = None
    ) -> tuple[str, policy_pb2.Policy]:
        result = await self._result(self._stub.Export, lambda: request, deadline_seconds, on_progress)
        return result.path, result.policy

    async def save(
        self, request: learner_pb2.SaveRequest, deadline_seconds: float, on_progress: OnProgress | None = None
    ) -> learner_pb2.SaveResult:
        result: learner_pb2.SaveResult = await self._result(
            self._stub.Save, lambda: request, deadline_seconds, on_progress
        )
        return result

    async def load(
        self, request: learner_pb2.LoadRequest, deadline_seconds: float, on_progress: OnProgress | None = None
    ) -> learner_pb2.LoadResult:
        result: learner_pb2.LoadResult = await self._result(
            self._stub.Load, lambda: request, deadline_seconds, on_progress
        )
        return result


async def _each(*parts: Iterable[Any]) -> AsyncIterator[Any]:
    for messages in parts:
        for message in messages:
            yield message
