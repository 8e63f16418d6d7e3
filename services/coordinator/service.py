"""CoordinatorService over gRPC: check, ask the run, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from antiphon.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc

from services.common.errors import InvalidRequest
from services.coordinator.run import Run

LONGEST_REASON = 1000  # characters
FULL_NAME = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The run as others see and steer it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def GetRun(
        self, request: coordinator_pb2.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_pb2.GetRunResponse:
        return self._run.state()

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[coordinator_pb2.WatchRunResponse]:
        if request.from_sequence < 0:
            raise InvalidRequest(f"from_sequence: expected 0 or more, got {request.from_sequence}")
        async for event in self._run.events.follow(request.from_sequence):
            yield coordinator_pb2.WatchRunResponse(event=event)

    async def StopRun(
        self, request: coordinator_pb2.StopRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_pb2.StopRunResponse:
        # It comes back in an event to every watcher, and an event is one message.
        self._run.stop(request.reason[:LONGEST_REASON] or "StopRun was called")
        return coordinator_pb2.StopRunResponse()
