"""A rollout worker over an engine in memory, and a channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import grant_pb2
from antiphon.types.v1.trajectory_pb2 import Trajectory

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.server import Server
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine
from services.rollout.rollout import Rollout
from services.rollout.states import STALE
from tests.contract.rollout.rollout_guard import Guard
from tests.contract.rollout.rollout_requests import commit_request, join_request
from tests.unit.rollout.memory_engine import MemoryEngine

DEADLINE = 10.0


class Client:
    """A worker and a channel to it."""

    def __init__(
        self, rollout: Rollout, engine: MemoryEngine, peer: Peer, running: asyncio.Task[None], guard: Guard
    ) -> None:
        self.rollout = rollout
        self.guard = guard
        self.engine = engine
        self.running = running
        self._peer = peer
        self.channel = peer.channel
        self._rollout_stub = rollout_pb2_grpc.RolloutServiceStub(peer.channel)
        self._tenant_stub = tenant_pb2_grpc.TenantServiceStub(peer.channel)
        self._counter = 0

    async def call(self, method: str, request: Any) -> Any:
        stub = self._tenant_stub if method in ("GetState", "Sleep", "Wake") else self._rollout_stub
        return await self._peer.call(getattr(stub, method), request, deadline_seconds=DEADLINE)

    async def state(self) -> tenant_pb2.GetStateResponse:
        return await self.call("GetState", tenant_pb2.GetStateRequest())

    def stream(self, request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        return self._peer.stream(self._rollout_stub.Generate, request, deadline_seconds=DEADLINE)

    async def generate(self, request: rollout_pb2.GenerateRequest) -> list[Trajectory]:
        return [answer.trajectory async for answer in self.stream(request)]

    def asked(self, request: rollout_pb2.GenerateRequest) -> asyncio.Task[list[Trajectory]]:
        return asyncio.create_task(self.generate(request))

    def id(self) -> str:
        self._counter += 1
        return f"id-{self._counter}"

    async def join(self, epoch: int, **fields: Any) -> rollout_pb2.JoinTransferResponse:
        return await self.call("JoinTransfer", join_request(epoch, **fields))

    async def begin(self, epoch: int, version: int, request_id: str = "", deadline: float = 5.0) -> None:
        await self.call(
            "BeginUpdate",
            rollout_pb2.BeginUpdateRequest(
                request_id=request_id or self.id(), epoch=epoch, policy_version=version, deadline_seconds=deadline
            ),
        )

    async def commit(self, version: int, **fields: Any) -> rollout_pb2.CommitUpdateResponse:
        return await self.call("CommitUpdate", commit_request(version, request_id=self.id(), **fields))

    async def sleep(self, *, discard: bool = False, deadline: float = 5.0, **fields: Any) -> tenant_pb2.SleepResponse:
        fields = {"request_id": self.id(), "discard_weights": discard, "deadline_seconds": deadline, **fields}
        return await self.call("Sleep", tenant_pb2.SleepRequest(**fields))

    async def wake(self, *tags: grant_pb2.MemoryTag, **fields: Any) -> tenant_pb2.WakeResponse:
        fields = {"request_id": self.id(), "tags": tags, "deadline_seconds": 5.0, **fields}
        return await self.call("Wake", tenant_pb2.WakeRequest(**fields))

    async def publish(self, epoch: int, version: int) -> None:
        await self.join(epoch)
        await self.begin(epoch, version)
        self.engine.deliver()
        await self.commit(version)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)


@asynccontextmanager
async def make_client(
    engine: MemoryEngine, folder: Path, *, shares_gpus: bool = False, **settings: Any
) -> AsyncIterator[Client]:
    process = ProcessConfig[RolloutConfig](
        service=ServiceConfig(
            run_id="test", worker_id="rollout-0", run_dir=folder, nats_url="nats://127.0.0.1:1", shares_gpus=shares_gpus
        ),
        model=ModelConfig(path="nowhere", dtype="float32"),
        settings=RolloutConfig(**{"max_outstanding": 20, **settings}),
    )

    async def start_engine(_: Any) -> Engine:
        return engine

    rollout = Rollout(process, start_engine)
    server = Server("127.0.0.1", 0, rollout.health_check)
    guard = Guard()
    service.add_to(server, rollout, guard)
    await server.start()
    running = asyncio.create_task(rollout.run())
    peer = Peer("rollout-0", server.address)
    client = Client(rollout, engine, peer, running, guard)
    await client.until(lambda: rollout.life.state == STALE)
    yield client
    await peer.close()
    await server.stop()
    running.cancel()
    await asyncio.wait({running})
