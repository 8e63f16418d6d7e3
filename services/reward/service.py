"""RewardService over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc

from services.common.errors import InvalidRequest, NotFound, Overloaded
from services.reward.answering import Answering, Work
from services.reward.reference import Reference
from services.reward.scorer import ScorerSet
from services.reward.scoring import ScoreStream

MOST_REFERENCE_STREAMS = 64
BATCHES_AHEAD = 4
"""A stream has so many micro-batches of the reference model's under way or not yet taken."""


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, scorers: ScorerSet, reference: Reference | None = None) -> None:
        self._scorers = scorers
        self._reference = reference
        self._reference_streams = 0

    async def Score(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        stream = ScoreStream(self._scorers)
        answering = Answering(requests, stream.accept, stream.finish, stream.room)
        async with aclosing(answering.answers()) as answers:
            async for response in answers:
                yield response

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.ListScorersResponse:
        infos = [
            reward_pb2.ScorerInfo(
                name=scorer.name, version=scorer.version, whole_groups=scorer.whole_groups, signature=scorer.signature
            )
            for scorer in self._scorers
        ]
        reference = None if self._reference is None else self._reference.process.info
        return reward_pb2.ListScorersResponse(scorers=infos, reference=reference)

    async def ReferenceLogProbs(
        self, requests: AsyncIterator[reward_pb2.ReferenceLogProbsRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reward_pb2.ReferenceLogProbsResponse]:
        if self._reference is None:
            raise NotFound("this reward worker has no reference model; its settings need a `reference`")
        if self._reference_streams >= MOST_REFERENCE_STREAMS:
            raise Overloaded(f"{MOST_REFERENCE_STREAMS} streams of ReferenceLogProbs run already")
        stream = _ReferenceStream(self._reference)
        room = BATCHES_AHEAD * self._reference.micro_batch_tokens
        answering = Answering(requests, stream.accept, stream.finish, room)
        self._reference_streams += 1
        try:
            async with aclosing(answering.answers()) as answers:
                async for response in answers:
                    yield response
        finally:
            self._reference_streams -= 1


class _ReferenceStream:
    """One ReferenceLogProbs call."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._header: reward_pb2.ReferenceHeader | None = None
        self._seen: set[str] = set()

    def accept(self, request: reward_pb2.ReferenceLogProbsRequest) -> Work[reward_pb2.ReferenceLogProbsResponse] | None:
        part = request.WhichOneof("part")
        if self._header is None:
            if part != "header":
                raise InvalidRequest(f"the stream must begin with its header, got {part}")
            self._header = header = request.header
            self._reference.check_header(header.temperature, header.tokenizer_digest)
            return None
        if part != "sequence":
            raise InvalidRequest(f"after {len(self._seen)} sequences: expected a sequence, got {part}")
        sequence, temperature = request.sequence, self._header.temperature
        if sequence.id in self._seen:
            raise InvalidRequest(f"sequence {sequence.id} came twice in one stream")
        self._seen.add(sequence.id)
        self._reference.check_sequence(sequence.id, sequence.token_ids)

        async def run() -> list[reward_pb2.ReferenceLogProbsResponse]:
            logprobs = await self._reference.logprobs(sequence.token_ids, temperature)
            return [reward_pb2.ReferenceLogProbsResponse(id=sequence.id, logprobs=logprobs)]

        return Work(len(sequence.token_ids), run)

    def finish(self) -> None:
        if self._header is None:
            raise InvalidRequest("the stream ended before its header")
