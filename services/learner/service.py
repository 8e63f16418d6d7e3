"""gRPC to and from the learner: check, call, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import progress_pb2

from services.common.errors import InvalidRequest, Unavailable
from services.common.tenancy import TenantGuard
from services.learner.framing import LONGEST_BYTES
from services.learner.learner import Learner
from services.learner.memory import OPTIMIZER, WEIGHTS

MOST_STEP_BYTES = LONGEST_BYTES - (1 << 20)
"""Of one TrainStep: it is one message to the ranks."""
MOST_FORWARD_BYTES = 1 << 28
"""Of one Forward: its answer, of 4 bytes for a token that may be 1 byte here, is one message of a rank."""


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """LearnerService over one Learner."""

    def __init__(self, learner: Learner, guard: TenantGuard) -> None:
        self._learner = learner
        self._guard = guard

    async def Forward(
        self, request_iterator: AsyncIterator[learner_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[learner_pb2.ForwardResponse]:
        header, sequences = await _header_and_rest(request_iterator, "sequence", MOST_FORWARD_BYTES)
        await self._guard.check(header.token, [WEIGHTS])
        for response in await self._learner.forward(header, sequences):
            yield response

    async def TrainStep(
        self, request_iterator: AsyncIterator[learner_pb2.TrainStepRequest], context: Any
    ) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        header, trajectories = await _header_and_rest(request_iterator, "trajectory", MOST_STEP_BYTES)
        await self._guard.check(header.token, [WEIGHTS, OPTIMIZER])
        operation = await self._learner.train_step(header, trajectories)
        async for said in operation.follow():
            yield _response(learner_pb2.TrainStepResponse, said)

    async def Encode(self, request: learner_pb2.EncodeRequest, context: Any) -> learner_pb2.EncodeResponse:
        return learner_pb2.EncodeResponse(encoded=await self._learner.encode(request.conversations))

    async def JoinTransfer(
        self, request: learner_pb2.JoinTransferRequest, context: Any
    ) -> learner_pb2.JoinTransferResponse:
        await self._guard.check(request.token, [WEIGHTS])
        return learner_pb2.JoinTransferResponse(manifest=await self._learner.join_transfer(request))

    async def Publish(
        self, request: learner_pb2.PublishRequest, context: Any
    ) -> AsyncIterator[learner_pb2.PublishResponse]:
        _require_id(request)
        await self._guard.check(request.token, [WEIGHTS])
        async for said in self._learner.publish(request).follow():
            yield _response(learner_pb2.PublishResponse, said)

    async def Export(
        self, request: learner_pb2.ExportRequest, context: Any
    ) -> AsyncIterator[learner_pb2.ExportResponse]:
        _require_id(request)
        await self._guard.check(request.token, [WEIGHTS])
        async for said in self._learner.export(request).follow():
            yield _response(learner_pb2.ExportResponse, said)

    async def Save(self, request: learner_pb2.SaveRequest, context: Any) -> AsyncIterator[learner_pb2.SaveResponse]:
        _require_id(request)
        await self._guard.check(request.token, [WEIGHTS, OPTIMIZER])
        async for said in self._learner.checkpoints.save(request).follow():
            yield _response(learner_pb2.SaveResponse, said)

    async def Load(self, request: learner_pb2.LoadRequest, context: Any) -> AsyncIterator[learner_pb2.LoadResponse]:
        _require_id(request)
        await self._guard.check(request.token, [WEIGHTS, OPTIMIZER])
        async for said in self._learner.checkpoints.load(request).follow():
            yield _response(learner_pb2.LoadResponse, said)


class TenantServicer(tenant_pb2_grpc.TenantServiceServicer):
    """TenantService of a learner."""

    def __init__(self, learner: Learner, guard: TenantGuard) -> None:
        self._learner = learner
        self._guard = guard

    async def GetState(self, request: tenant_pb2.GetStateRequest, context: Any) -> tenant_pb2.GetStateResponse:
        state = await self._learner.state()
        if state.state == tenant_pb2.WORKER_STATE_STARTING:
            raise Unavailable(f"the learner does not work yet, or no more: {self._learner.problem}")
        return state

    async def Sleep(self, request: tenant_pb2.SleepRequest, context: Any) -> tenant_pb2.SleepResponse:
        _require_id(request)
        await self._guard.check(request.token)
        return await self._learner.memory.sleep(request).result()

    async def Wake(self, request: tenant_pb2.WakeRequest, context: Any) -> tenant_pb2.WakeResponse:
        _require_id(request)
        await self._guard.check(request.token, request.tags)
        return await self._learner.memory.wake(request).result()


async def _header_and_rest(requests: AsyncIterator[Any], kind: str, most_bytes: int) -> tuple[Any, list[Any]]:
    """A stream of one header and then messages of one kind. Raises InvalidRequest for any other order, or for more.

    It is raised at the end of the stream, whose rest is read and dropped: a caller that is told in the middle of its
    sending sees an internal error of its own library (grpcio 1.85) in place of what it was told.
    """
    header: Any = None
    rest: list[Any] = []
    problem = ""
    number = size = 0
    async for request in requests:
        if problem:
            continue
        size += request.ByteSize() + 8
        part = request.WhichOneof("part")
        if size > most_bytes:
            problem = f"message {number} of the stream: beyond {most_bytes} bytes in all; send less"
        elif part != ("header" if header is None else kind):
            expected = "the header" if header is None else f"a {kind}"
            problem = f"message {number} of the stream: expected {expected}, got {part}"
        elif header is None:
            header = request.header
        else:
            rest.append(getattr(request, kind))
        if problem:
            rest.clear()
        number += 1
    if problem or header is None:
        raise InvalidRequest(problem or "the stream ended before its header")
    return header, rest


def _require_id(
    request: learner_pb2.PublishRequest
    | learner_pb2.ExportRequest
    | learner_pb2.SaveRequest
    | learner_pb2.LoadRequest
    | tenant_pb2.SleepRequest
    | tenant_pb2.WakeRequest,
) -> None:
    if not request.request_id:
        name = type(request).__name__
        raise InvalidRequest(f"{name}: request_id is empty; a repeat could not be told from a new request")


def _response(kind: type[Any], said: Any) -> Any:
    return kind(progress=said) if isinstance(said, progress_pb2.Progress) else kind(result=said)
