"""Hand-overs over a real stream: the same story with tenants in this process and behind gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV as KV
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_OPTIMIZER as OPTIMIZER
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS as WEIGHTS
from antiphon.types.v1.grant_pb2 import GrantToken

from services.common.bus import Bus
from services.common.config import ServiceConfig
from services.common.errors import Conflict, InvalidRequest
from services.common.handoff_stream import JetStreamStore
from services.common.server import Server
from services.common.tenancy import TenantGuard
from services.coordinator.clients import TenantClient
from services.coordinator.handoff import Handoff, Tenant, Wish
from tests.contract.echo_service import well

NODE, GPU, CAPACITY = "host-1.example", "GPU-0", 100
ENGINE, LEARNER = {WEIGHTS: 20, KV: 60}, {WEIGHTS: 20, OPTIMIZER: 60}


class Holder(tenant_pb2_grpc.TenantServiceServicer):
    """A worker whose memory is a set of tags."""

    def __init__(self, worker_id: str, bus: Bus) -> None:
        service = ServiceConfig(
            run_id="red", worker_id=worker_id, node=NODE, shares_gpus=True, run_dir=Path("unused"), nats_url="unused"
        )  # fmt: skip
        self.worker_id = worker_id
        self.instance_id = service.instance_id
        self.resident: set[int] = set()
        self.guard = TenantGuard(service)
        self.following = asyncio.create_task(self.guard.run(bus))

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse:
        async with self.guard.moving(request.token):
            self.resident -= set(request.tags)
            await self.guard.slept(tenant_pb2.SleepResponse(), list(request.tags))
        return tenant_pb2.SleepResponse()

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse:
        async with self.guard.moving(request.token, list(request.tags)):
            self.resident |= set(request.tags)
            await self.guard.woke(tenant_pb2.WakeResponse(), list(request.tags))
        return tenant_pb2.WakeResponse()

    async def Sleep(self, request: tenant_pb2.SleepRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await self.sleep(request, request.deadline_seconds)

    async def Wake(self, request: tenant_pb2.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await self.wake(request, request.deadline_seconds)


class Story:
    """Two workers of one run, and its hand-overs."""

    def __init__(self, engine: Holder, learner: Holder, calls: dict[str, Tenant], store: JetStreamStore) -> None:
        self.engine, self.learner, self.calls = engine, learner, calls
        self.handoff = Handoff(
            store,
            run_id="red",
            instance_id="coordinator-1",
            capacity={NODE: {GPU: CAPACITY}},
            tenants=lambda: list(calls.values()),
        )

    async def give(self, seconds: float = 10.0, **wishes: dict[int, int]) -> GrantToken:
        tokens = await self.handoff.to(
            [
                Wish(self.calls[f"{kind}-0"], NODE, {tag: {GPU: size} for tag, size in memory.items()})
                for kind, memory in wishes.items()
            ],
            deadline_seconds=seconds,
        )
        return tokens[NODE]


@pytest.fixture(params=["process", "wire"])
async def story(request: pytest.FixtureRequest, nats_server: Any) -> AsyncIterator[Story]:
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(nats_server.url, "test", nats_server.monitor_url)
        stack.push_async_callback(bus.close)
        holders = [Holder("engine-0", bus), Holder("learner-0", bus)]
        calls: dict[str, Tenant] = {holder.worker_id: holder for holder in holders}
        if request.param == "wire":
            for holder in holders:
                server = Server("127.0.0.1", 0, well)
                name = tenant_pb2.DESCRIPTOR.services_by_name["TenantService"].full_name
                server.add(tenant_pb2_grpc.add_TenantServiceServicer_to_server, holder, name)
                await server.start()
                stack.push_async_callback(server.stop)
                client = TenantClient(holder.worker_id, holder.instance_id, server.address)
                stack.push_async_callback(client.close)
                calls[holder.worker_id] = client
        yield Story(holders[0], holders[1], calls, await JetStreamStore.open(bus))
        for holder in holders:
            holder.following.cancel()
        await asyncio.gather(*(holder.following for holder in holders), return_exceptions=True)


async def test_the_gpus_go_round_and_an_old_token_touches_nothing(story: Story) -> None:
    first = await story.give(engine=ENGINE)
    assert (story.engine.resident, story.learner.resident) == ({WEIGHTS, KV}, set())
    second = await story.give(learner=LEARNER)
    assert (story.engine.resident, story.learner.resident) == (set(), {WEIGHTS, OPTIMIZER})
    third = await story.give(engine={WEIGHTS: 20}, learner=LEARNER)
    assert (story.engine.resident, story.learner.resident) == ({WEIGHTS}, {WEIGHTS, OPTIMIZER})
    assert first.epoch == second.epoch == third.epoch
    assert first.sequence < second.sequence < third.sequence
    stale = tenant_pb2.WakeRequest(request_id="late", tags=[KV], token=first, deadline_seconds=1.0)
    with pytest.raises(Conflict, match=f"token {first.sequence} .* names it is {third.sequence}"):
        await story.calls["engine-0"].wake(stale, 5.0)
    with pytest.raises(Conflict, match=f"token {second.sequence} "):
        await story.calls["learner-0"].sleep(
            tenant_pb2.SleepRequest(request_id="late", tags=[OPTIMIZER], token=second, deadline_seconds=1.0), 5.0
        )
    assert (story.engine.resident, story.learner.resident) == ({WEIGHTS}, {WEIGHTS, OPTIMIZER})
    await story.handoff.release(deadline_seconds=10.0)
    assert (story.engine.resident, story.learner.resident) == (set(), set())


async def test_what_does_not_fit_touches_nothing(story: Story) -> None:
    await story.give(engine=ENGINE)
    with pytest.raises(InvalidRequest, match=r"and it has 0\.00 GiB to grant"):
        await story.give(engine=ENGINE, learner=LEARNER)
    assert story.engine.resident == {WEIGHTS, KV}
    await story.engine.guard.check(story.engine.guard.token, [WEIGHTS, KV])


async def test_nobody_hands_over_while_nats_is_dead_and_nobody_loses_a_grant(story: Story, nats_server: Any) -> None:
    token = await story.give(engine=ENGINE)
    nats_server.kill()
    handing = asyncio.create_task(story.give(20.0, learner=LEARNER))
    await asyncio.sleep(0.3)
    assert not handing.done() and story.engine.resident == {WEIGHTS, KV}
    await story.engine.guard.check(token, [WEIGHTS, KV])  # and works on
    nats_server.start()
    assert (await handing).sequence > token.sequence
    assert (story.engine.resident, story.learner.resident) == (set(), {WEIGHTS, OPTIMIZER})
