"""The rollout service on one GPU: sleep, wake and refill by their effects on the device and on what is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import trajectory_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS
from antiphon.types.v1.trajectory_pb2 import PromptId

from benchmarks.one_rank_learner import OneRankLearner, write_model
from benchmarks.rollout_processes import in_this_process, process_config
from services.common.client import new_request_id
from services.common.config import ModelConfig
from services.common.errors import Overloaded, Unavailable
from services.coordinator.clients import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.gpus import engine_gpus
from services.rollout.rollout import Rollout

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

SECONDS = 60.0
GIB = 2**30
KV_GIB = 4.0


@dataclass
class Live:
    """An engine that shares its GPU, and the learner that fills it."""

    client: RolloutClient
    rollout: Rollout
    learner: OneRankLearner
    version: int = -1
    calls: int = 0

    async def publish(self) -> None:
        self.version += 1
        await self.learner.publish(self.client, self.version)

    async def sleep(self, *, discard: bool = False) -> tenant_pb2.SleepResponse:
        request = tenant_pb2.SleepRequest(
            request_id=new_request_id(), discard_weights=discard, deadline_seconds=SECONDS
        )
        return await self.client.sleep(request, SECONDS)

    async def wake(self, *tags: Any) -> tenant_pb2.WakeResponse:
        request = tenant_pb2.WakeRequest(request_id=new_request_id(), tags=tags, deadline_seconds=SECONDS)
        return await self.client.wake(request, SECONDS)

    async def generate(self, *, samples: int = 1, temperature: float = 0.0, max_tokens: int = 32) -> list[Any]:
        self.calls += 1
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=PromptId(dataset="gpu", row=self.calls),
            prompt_token_ids=range(100, 150),
            samples=samples,
            sampling=rollout_pb2.Sampling(temperature=temperature, max_tokens=max_tokens),
        )
        async with aclosing(self.client.generate(request, SECONDS)) as answers:
            return [trajectory async for trajectory in answers]

    async def greedy(self) -> list[int]:
        (trajectory,) = await self.generate()
        return list(trajectory.token_ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder: Path = tmp_path_factory.mktemp("engine")
    model = ModelConfig(path=str(write_model(folder / "model", "135m", "bfloat16")), dtype="bfloat16")
    settings = RolloutConfig(max_sequence_tokens=1024, kv_cache_gib=KV_GIB, eager=True)
    async with in_this_process(process_config(model, settings, folder, shares_gpus=True)) as (client, rollout):
        learner = OneRankLearner(folder / "model", dtype="bfloat16", device="cuda", seed=1)
        it = Live(client, rollout, learner)
        await it.publish()
        yield it


async def test_state_tells_the_device_and_what_is_held_there(live: Live) -> None:
    (device,) = (await live.client.state()).devices
    assert device.uuid == engine_gpus()[0].uuid
    held = {part.tag: part.bytes for part in device.held}
    assert held[MEMORY_TAG_KV] == pytest.approx(KV_GIB * GIB, rel=0.02)
    assert held[MEMORY_TAG_WEIGHTS] == pytest.approx(live.learner.bytes, rel=0.3)


async def test_weights_that_are_kept_give_the_same_answers(live: Live) -> None:
    before = await live.greedy()
    held = {part.tag: part.bytes for part in (await live.client.state()).devices[0].held}
    slept = await live.sleep()
    freed = slept.devices[0].free_bytes_after - slept.devices[0].free_bytes_before
    assert freed >= 0.9 * sum(held.values())
    with pytest.raises(Unavailable, match="ASLEEP"):
        await live.generate()
    await live.wake(MEMORY_TAG_WEIGHTS)
    await live.wake(MEMORY_TAG_KV)
    state = await live.client.state()
    assert (state.state, state.policy.version) == (tenant_pb2.WORKER_STATE_READY, live.version)
    assert await live.greedy() == before


async def test_a_refill_of_the_same_weights_gives_the_same_answers(live: Live) -> None:
    before = await live.greedy()
    await live.sleep(discard=True)
    await live.wake()
    state = await live.client.state()
    assert (state.state, list(state.asleep)) == (tenant_pb2.WORKER_STATE_STALE, [MEMORY_TAG_KV])
    with pytest.raises(Unavailable, match="discarded"):
        await live.generate()
    await live.publish()
    assert await live.greedy() == before  # buffers that no publication fills (rotary tables) came back, too


async def test_a_sleep_waits_for_what_runs(live: Live) -> None:
    running = asyncio.create_task(live.generate(samples=8, temperature=1.0, max_tokens=900))
    async with asyncio.timeout(10):
        while live.rollout._gate.running < 8:  # noqa: ASYNC110 - the gate sets no event
            await asyncio.sleep(0.001)
    await live.sleep()
    assert {t.finish_reason for t in await asyncio.wait_for(running, 5)} == {trajectory_pb2.FINISH_REASON_LENGTH}
    await live.wake()
    assert len(await live.greedy()) == 82


async def test_a_wake_without_room_touches_nothing(live: Live) -> None:
    import torch

    before = await live.greedy()
    await live.sleep()
    free, _ = torch.cuda.mem_get_info()
    others = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(Overloaded, match=r"GPU-.* are missing"):
        await live.wake()
    del others
    torch.cuda.empty_cache()
    await live.wake()
    assert await live.greedy() == before


async def test_memory_stays_flat_over_cycles(live: Live) -> None:
    used = []
    for _ in range(12):
        slept = await live.sleep(discard=True)
        used.append(slept.devices[0].free_bytes_after)
        await live.wake()
        await live.publish()
        await live.generate(samples=4, temperature=1.0)
    settled = used[3:]
    assert max(settled) - min(settled) <= 0.01 * KV_GIB * GIB
