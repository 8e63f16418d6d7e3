"""RewardService over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc

from services.reward.answering import Answering
from services.reward.scorer import ScorerSet
from services.reward.scoring import ScoreStream


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, scorers: ScorerSet) -> None:
        self._scorers = scorers

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
        return reward_pb2.ListScorersResponse(scorers=infos)
