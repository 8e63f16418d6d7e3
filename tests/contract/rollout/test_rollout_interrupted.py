"""What an engine owes in the middle of an answer: publications, sleep, abort, callers that leave, death."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import Unavailable
from services.rollout.engine import EngineDead
from services.rollout.states import ASLEEP, FAILED, READY, STALE
from tests.contract.rollout.rollout_engines import Worker, real_worker
from tests.system import vllm_publications as learner

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LONG = 100


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)]
)
async def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with real_worker(tmp_path_factory.mktemp("engine"), request.param) as it:
        await it.publish(0)
        yield it


async def until_running(worker: Worker, count: int) -> None:
    assert worker.rollout is not None
    async with asyncio.timeout(20):
        while worker.rollout._gate.running < count:  # noqa: ASYNC110 - the gate sets no event
            await asyncio.sleep(0.001)


async def version_of(worker: Worker) -> int:
    return int((await worker.state()).policy.version)


async def test_every_answer_is_of_the_version_that_it_is_stamped_with(worker: Worker) -> None:
    """A01, A08, W05: prompts are asked for without a pause, the same ones too, while twenty policies are published."""
    models: dict[int, Any] = {}
    found: list[trajectory_pb2.Trajectory] = []
    stopping = asyncio.Event()

    async def ask_on(row: int) -> None:
        while not stopping.is_set():
            found.extend(await worker.ask(samples=2, row=row, max_tokens=6))

    askers = [asyncio.create_task(ask_on(row)) for row in range(2)]
    first = await version_of(worker)
    models[first] = copy.deepcopy(worker.model)
    for version in range(first + 1, first + 21):
        learner.shaken(worker.model, seed=version)
        models[version] = copy.deepcopy(worker.model)
        await worker.publish(version)
    stopping.set()
    await asyncio.gather(*askers)
    seen = {trajectory.version_spans[0].policy_version for trajectory in found}
    assert len(seen) >= 10
    for trajectory in found:
        assert [(span.start, span.end) for span in trajectory.version_spans] == [(4, 10)]
        version = trajectory.version_spans[0].policy_version
        expected = learner.token_logprobs(models[version], list(trajectory.token_ids))[3:]
        assert trajectory.behavior_logprobs[4:] == pytest.approx(expected, abs=1e-3)


async def test_a_sleep_waits_for_those_that_are_decoded(worker: Worker) -> None:
    """H10: nothing is unmapped under a running forward; nobody is answered before it is true."""
    assert worker.rollout is not None
    sleeping = worker.rollout.sleeping
    running = asyncio.create_task(worker.ask(samples=8, max_tokens=LONG))
    await until_running(worker, 8)
    slept = asyncio.create_task(sleeping.sleep((), discard_weights=True, deadline_seconds=30))
    late = asyncio.create_task(worker.ask(row=9))
    await slept
    assert {len(t.token_ids) for t in await running} == {4 + LONG}
    with pytest.raises(Unavailable, match="ASLEEP"):
        await late
    assert (await worker.state()).state == ASLEEP
    await sleeping.wake(sleeping.wakeable(()), deadline_seconds=30)
    assert (await worker.state()).state == STALE
    with pytest.raises(Unavailable, match="STALE"):
        await worker.ask()
    await worker.publish(await version_of(worker))
    await sleeping.sleep((), discard_weights=False, deadline_seconds=30)
    await sleeping.wake(sleeping.wakeable(()), deadline_seconds=30)
    assert (await worker.state()).state == READY
    assert len(await worker.ask()) == 3


async def test_an_abort_gives_what_was_sampled_so_far(worker: Worker) -> None:
    request = worker.request(samples=4, max_tokens=LONG)
    call = asyncio.create_task(worker.generate(request))
    await until_running(worker, 4)
    await worker.call("Abort", rollout_pb2.AbortRequest(request_ids=[request.request_id]))
    aborted = await call
    whole = await worker.ask(samples=4, max_tokens=LONG)
    assert any(t.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED for t in aborted)
    for part, full in zip(aborted, whole, strict=True):
        assert part.token_ids == full.token_ids[: len(part.token_ids)]
        assert len(part.behavior_logprobs) == len(part.token_ids)
    assert await worker.generate(request) == aborted


async def test_a_call_that_nobody_waits_for_leaves_the_engine(worker: Worker) -> None:
    """H13: and what it would have answered is never taken for an answer to the next one."""
    assert worker.rollout is not None
    request = worker.request(samples=4, max_tokens=LONG)
    call = asyncio.create_task(worker.generate(request))
    await until_running(worker, 4)
    call.cancel()
    async with asyncio.timeout(10):
        while worker.rollout._gate.running:  # noqa: ASYNC110 - the gate sets no event
            await asyncio.sleep(0.001)
    again = await worker.generate(request)
    assert [t.token_ids for t in again] == [t.token_ids for t in await worker.ask(samples=4, max_tokens=LONG)]


@pytest.mark.parametrize("worker", ["transformers"], indirect=True)
async def test_a_model_that_stands_still_does_not_take_the_server_with_it(worker: Worker) -> None:
    """Last: it ends the engine."""
    assert worker.rollout is not None and worker.running is not None
    engine: Any = worker.rollout.engine
    engine._still_seconds = 0.5
    (pid,) = engine.info.pids
    call = asyncio.create_task(worker.ask(samples=8, max_tokens=LONG))
    await until_running(worker, 8)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match=rf"\(pid {pid}\) has said nothing for .* it was killed"):
        await asyncio.wait_for(call, 10)
    with pytest.raises(EngineDead, match="said nothing"):
        await asyncio.wait_for(worker.running, 10)
    assert (await worker.state()).state == FAILED
    with pytest.raises(Unavailable, match="FAILED"):
        await worker.ask()
    engine._process.join(10)
    assert not engine._process.is_alive()
