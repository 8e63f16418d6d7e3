"""A learner with ranks that are a twin in memory, behind a real server, and the client that calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import grant_pb2, transfer_pb2

from services.common.client import Peer
from services.common.errors import Conflict
from services.common.server import Server
from services.learner.learner import Learner
from services.learner.service import LearnerServicer, TenantServicer
from tests.unit.learner.ranks_twin import RanksTwin

DEADLINE_SECONDS = 10.0
WEIGHTS, OPTIMIZER, KV = grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_OPTIMIZER, grant_pb2.MEMORY_TAG_KV
TOKEN = grant_pb2.GrantToken(epoch="e", sequence=7)
GIB = 1 << 30


class Client:
    """A learner behind its own server, and a peer that calls it."""

    def __init__(self, ranks: RanksTwin, guard: RecordingGuard, peer: Peer) -> None:
        self.ranks = ranks
        self.guard = guard
        self.peer = peer
        self.stub = learner_pb2_grpc.LearnerServiceStub(peer.channel)
        self.tenant = tenant_pb2_grpc.TenantServiceStub(peer.channel)

    async def result(self, method: Any, request: Any) -> Any:
        """The last message of a progress stream; every one before it is progress."""
        messages = [m async for m in self.peer.stream(method, request, deadline_seconds=DEADLINE_SECONDS)]
        assert [m.WhichOneof("part") for m in messages[:-1]] == ["progress"] * (len(messages) - 1)
        return messages[-1].result

    async def step(self, header: Any, batch: list[Any]) -> learner_pb2.StepResult:
        return await self.result(self.stub.TrainStep, step_requests(header, batch))

    async def join(self, epoch: int, **settings: Any) -> transfer_pb2.TransferManifest:
        request = learner_pb2.JoinTransferRequest(
            epoch=epoch,
            transport=transfer_pb2.TRANSPORT_GLOO,
            receiver_ranks=2,
            bucket_bytes=1 << 20,
            deadline_seconds=5,
        )
        for name, value in settings.items():
            setattr(request, name, value)
        response = await self.peer.call(self.stub.JoinTransfer, request, deadline_seconds=DEADLINE_SECONDS)
        return response.manifest

    async def publish(
        self, epoch: int, version: int, request_id: str, deadline: float = 5.0
    ) -> learner_pb2.PublishResult:
        request = learner_pb2.PublishRequest(
            request_id=request_id, epoch=epoch, policy_version=version, deadline_seconds=deadline
        )
        return await self.result(self.stub.Publish, request)

    async def export(self, path: str, request_id: str) -> learner_pb2.ExportResult:
        return await self.result(self.stub.Export, learner_pb2.ExportRequest(request_id=request_id, path=path))

    async def save(self, path: Path, version: int, request_id: str, *delete: Path) -> learner_pb2.SaveResult:
        request = learner_pb2.SaveRequest(
            request_id=request_id, path=str(path), policy_version=version, delete_paths=map(str, delete)
        )
        return await self.result(self.stub.Save, request)

    async def load(self, path: Path, request_id: str, **settings: Any) -> learner_pb2.LoadResult:
        request = learner_pb2.LoadRequest(request_id=request_id, path=str(path), **settings)
        return await self.result(self.stub.Load, request)

    async def forward(self, *requests: learner_pb2.ForwardRequest) -> dict[str, learner_pb2.ForwardResponse]:
        answers = self.peer.stream(self.stub.Forward, iter(requests), deadline_seconds=DEADLINE_SECONDS)
        return {answer.id: answer async for answer in answers}

    async def state(self) -> tenant_pb2.GetStateResponse:
        return await self.peer.call(
            self.tenant.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=DEADLINE_SECONDS
        )

    async def sleep(self, request_id: str, *tags: int, deadline: float = 5.0) -> tenant_pb2.SleepResponse:
        request = tenant_pb2.SleepRequest(request_id=request_id, tags=tags, token=TOKEN, deadline_seconds=deadline)
        return await self.peer.call(self.tenant.Sleep, request, deadline_seconds=DEADLINE_SECONDS)

    async def wake(self, request_id: str, *tags: int) -> tenant_pb2.WakeResponse:
        request = tenant_pb2.WakeRequest(request_id=request_id, tags=tags, token=TOKEN, deadline_seconds=5.0)
        return await self.peer.call(self.tenant.Wake, request, deadline_seconds=DEADLINE_SECONDS)


class RecordingGuard:
    """What is checked and said; refuses while `stale`."""

    shares_gpus = True

    def __init__(self) -> None:
        self.token = grant_pb2.GrantToken()
        self.stale = False
        self.checked: list[tuple[int, list[int]]] = []
        self.said: list[tuple[str, list[int]]] = []

    async def check(self, token: grant_pb2.GrantToken, tags: Any = ()) -> None:
        self.checked.append((token.sequence, sorted(tags)))
        if self.stale:
            raise Conflict(f"token {token.sequence} does not hold")
        self.token.CopyFrom(token)

    @asynccontextmanager
    async def moving(self, token: grant_pb2.GrantToken, tags: Any = ()) -> AsyncIterator[None]:
        await self.check(token, tags)
        yield

    async def slept(self, response: tenant_pb2.SleepResponse, tags: Any) -> None:
        self.said.append(("slept", sorted(tags)))

    async def woke(self, response: tenant_pb2.WakeResponse, tags: Any) -> None:
        self.said.append(("woke", sorted(tags)))


def step_requests(header: Any, batch: list[Any]) -> Any:
    requests = [learner_pb2.TrainStepRequest(header=header)]
    return iter(requests + [learner_pb2.TrainStepRequest(trajectory=row) for row in batch])


def forward_header(temperature: float = 1.0) -> learner_pb2.ForwardRequest:
    return learner_pb2.ForwardRequest(header=learner_pb2.ForwardHeader(temperature=temperature))


def sequence(name: str, *token_ids: int) -> learner_pb2.ForwardRequest:
    return learner_pb2.ForwardRequest(sequence=learner_pb2.Sequence(id=name, token_ids=token_ids))


@asynccontextmanager
async def served_learner() -> AsyncIterator[Client]:
    ranks = RanksTwin(count=2)
    guard = RecordingGuard()
    learner = Learner(ranks, guard)

    async def health_check() -> str | None:
        return ranks.problem

    server = Server("127.0.0.1", 0, health_check)
    for register, servicer, module, name in (
        (
            learner_pb2_grpc.add_LearnerServiceServicer_to_server,
            LearnerServicer(learner, guard),
            learner_pb2,
            "LearnerService",
        ),
        (
            tenant_pb2_grpc.add_TenantServiceServicer_to_server,
            TenantServicer(learner, guard),
            tenant_pb2,
            "TenantService",
        ),
    ):
        server.add(register, servicer, module.DESCRIPTOR.services_by_name[name].full_name)
    await server.start()
    serving = asyncio.create_task(server.serve_until_stopped(grace_seconds=0.1))
    peer = Peer("learner", server.address)
    yield Client(ranks, guard, peer)
    await peer.close()
    server.request_stop()
    await serving


async def until(condition) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), DEADLINE_SECONDS)
