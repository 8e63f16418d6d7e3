"""A reward service without children: a plain function as scorer, the simulated policy's first version as reference, and
switches for what may go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc

from services.common.errors import AntiphonError, Conflict, InvalidRequest, NotFound
from tests.simulated.policy import logprobs, policy

Outcome = float | reward_pb2.ScoreFailure


def share_of_digits(candidate: reward_pb2.Candidate) -> float:
    """The scorer of the simulation: how much of the answer is digits."""
    text = candidate.response_text
    return sum(c.isdigit() for c in text) / len(text) if text else 0.0


class SimulatedReward(reward_pb2_grpc.RewardServiceServicer):
    """Knows the scorer digits@1."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.version = "1"
        self.score: Callable[[reward_pb2.Candidate], Outcome] = share_of_digits
        self.seen: list[reward_pb2.Candidate] = []
        self.streams = 0
        self.delay_seconds: Callable[[reward_pb2.Candidate], float] = lambda candidate: 0.0
        self.reference: reward_pb2.ReferenceInfo | None = reward_pb2.ReferenceInfo(
            path="simulated", dtype="float32", digest=policy(0).digest, tokenizer_digest=b"simulated",
            vocabulary_size=1000, max_sequence_tokens=1000,
        )  # fmt: skip
        self.stream_errors: list[AntiphonError] = []  # raised one per stream, before any answer

    async def ListScorers(self, request: Any, context: Any) -> reward_pb2.ListScorersResponse:
        info = reward_pb2.ScorerInfo(name="digits", version=self.version, signature="antiphon")
        return reward_pb2.ListScorersResponse(scorers=[info], reference=self.reference)

    async def ReferenceLogProbs(
        self, requests: AsyncIterator[reward_pb2.ReferenceLogProbsRequest], context: Any
    ) -> AsyncIterator[reward_pb2.ReferenceLogProbsResponse]:
        """Of the policy's version 0, whatever the temperature."""
        parts = [request async for request in requests]
        if self.reference is None:
            raise NotFound(f"{self.worker_id} has no reference model")
        if not parts or parts[0].WhichOneof("part") != "header":
            raise InvalidRequest("no header")
        digest = parts[0].header.tokenizer_digest
        if digest not in (b"", self.reference.tokenizer_digest):
            raise Conflict("another tokenizer")
        for part in parts[1:]:
            values = logprobs(part.sequence.token_ids, 0)
            yield reward_pb2.ReferenceLogProbsResponse(id=part.sequence.id, logprobs=values)

    async def Score(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest], context: Any
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        self.streams += 1
        candidates = []
        async for request in requests:
            if request.scorer not in ("digits", f"digits@{self.version}"):
                raise NotFound(f"no scorer {request.scorer}")
            candidates.append(request.candidate)
        if self.stream_errors:
            raise self.stream_errors.pop(0)
        await asyncio.sleep(self.delay_seconds(candidates[0]))
        for candidate in reversed(candidates):
            self.seen.append(candidate)
            answer = reward_pb2.ScoreResponse(
                prompt_id=candidate.prompt_id, sample_number=candidate.sample_number, scorer=f"digits@{self.version}"
            )
            outcome = self.score(candidate)
            if isinstance(outcome, reward_pb2.ScoreFailure):
                answer.failure.CopyFrom(outcome)
            else:
                answer.score.value = outcome
            yield answer
