"""RewardService over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc

from services.common.errors import InvalidRequest
from services.reward.scorer import Outcome, Scorer, ScorerSet, full_name

LONGEST_ID = 1000  # characters; what was seen is remembered for the length of a stream


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, scorers: ScorerSet) -> None:
        self._scorers = scorers

    async def Score(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        stream = _Stream(self._scorers)
        async for response in stream.answers(requests):
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
        return reward_pb2.ListScorersResponse(scorers=infos)


class _Stream:
    """One Score call: reads ahead no more than what keeps the scorers busy, answers as outcomes come."""

    def __init__(self, scorers: ScorerSet) -> None:
        self._scorers = scorers
        self._room = asyncio.Semaphore(2 * sum(scorer.concurrency for scorer in scorers))
        self._done: asyncio.Queue[reward_pb2.ScoreResponse | None] = asyncio.Queue()
        self._seen: set[tuple[str, int, int, int]] = set()

    async def answers(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest]
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._done.put_nowait(None))
        try:
            while (response := await self._done.get()) is not None:
                yield response
                self._room.release()
            await reading  # raises what ended the reading
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[reward_pb2.ScoreRequest]) -> None:
        """Reads to the end and waits for the last outcome; the first error cancels what is under way."""
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    scorer = self._check(request)
                    await self._room.acquire()
                    group.create_task(self._score(scorer, request.candidate))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _check(self, request: reward_pb2.ScoreRequest) -> Scorer:
        candidate = request.candidate
        prompt = candidate.prompt_id
        if not prompt.dataset or len(prompt.dataset) > LONGEST_ID:
            raise InvalidRequest(
                f"a candidate needs a prompt_id.dataset of 1 to {LONGEST_ID} characters, got {len(prompt.dataset)}"
            )
        key = (prompt.dataset, prompt.row, prompt.epoch, candidate.sample_number)
        if key in self._seen:
            which = f"{prompt.dataset}/{prompt.epoch}/{prompt.row}/{candidate.sample_number}"
            raise InvalidRequest(f"candidate {which} came twice in one stream; an id is scored once per call")
        self._seen.add(key)
        return self._scorers.find(request.scorer)

    async def _score(self, scorer: Scorer, candidate: reward_pb2.Candidate) -> None:
        (outcome,) = await scorer.score([candidate])
        self._done.put_nowait(_response(scorer, candidate, outcome))


def _response(scorer: Scorer, candidate: reward_pb2.Candidate, outcome: Outcome) -> reward_pb2.ScoreResponse:
    response = reward_pb2.ScoreResponse(
        prompt_id=candidate.prompt_id, sample_number=candidate.sample_number, scorer=full_name(scorer)
    )
    if isinstance(outcome, reward_pb2.ScoreFailure):
        response.failure.CopyFrom(outcome)
    else:
        response.score.CopyFrom(outcome)
    return response
