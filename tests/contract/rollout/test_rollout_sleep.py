"""TenantService of a rollout worker over a real channel with an engine in memory: giving memory up."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, EngineDead
from services.rollout.rollout import Rollout
from services.rollout.states import ASLEEP, FAILED, READY, STALE, STARTING
from tests.contract.rollout.rollout_client import Client, make_client
from tests.contract.rollout.rollout_guard import KV, WEIGHTS, Guard
from tests.contract.rollout.rollout_requests import ask, commit_request, join_request
from tests.unit.rollout.memory_engine import MemoryEngine

# Sleep and Wake


async def test_sleep_and_wake_measure_and_serve_the_same_version(on_gpus: Client) -> None:
    slept = await on_gpus.sleep()
    assert [(d.uuid, d.free_bytes_before, d.free_bytes_after) for d in slept.devices] == [
        ("GPU-0", 50, 900),
        ("GPU-1", 50, 900),
    ]
    state = await on_gpus.state()
    assert (state.state, list(state.asleep), state.policy.version) == (ASLEEP, [WEIGHTS, KV], 0)
    assert [(d.free_bytes, d.total_bytes, len(d.held)) for d in state.devices] == [(900, 1000, 0)] * 2
    with pytest.raises(Unavailable, match="ASLEEP: its memory sleeps"):
        await on_gpus.generate(ask())
    assert await on_gpus.rollout.health_check() is None
    woke = await on_gpus.wake()
    assert [(d.free_bytes_before, d.free_bytes_after) for d in woke.devices] == [(900, 50), (900, 50)]
    state = await on_gpus.state()
    assert (state.state, list(state.asleep), state.policy.version) == (READY, [], 0)
    assert [(t.tag, t.bytes) for t in state.devices[0].held] == [(WEIGHTS, 600), (KV, 200)]
    assert len(await on_gpus.generate(ask())) == 3
    assert on_gpus.engine.sleeps == [False]


async def test_a_wake_in_two_parts_serves_after_the_second(on_gpus: Client) -> None:
    await on_gpus.sleep()
    with pytest.raises(InvalidRequest, match="with the weights or after them"):
        await on_gpus.wake(KV)
    await on_gpus.wake(WEIGHTS)
    state = await on_gpus.state()
    assert (state.state, list(state.asleep)) == (ASLEEP, [KV])
    with pytest.raises(Unavailable, match="ASLEEP"):
        await on_gpus.generate(ask())
    with pytest.raises(Conflict, match="wake it"):
        await on_gpus.begin(1, 1)
    await on_gpus.wake(KV)
    assert (await on_gpus.state()).state == READY


async def test_discarded_weights_come_back_stale_and_the_commit_wakes_the_rest(on_gpus: Client) -> None:
    await on_gpus.sleep(discard=True)
    with pytest.raises(InvalidRequest, match="the weights were discarded"):
        await on_gpus.wake(WEIGHTS, KV)
    assert on_gpus.engine.wakes == []
    await on_gpus.wake()
    state = await on_gpus.state()
    assert (state.state, list(state.asleep)) == (STALE, [KV])
    with pytest.raises(Unavailable, match=r"STALE: .*discarded"):
        await on_gpus.generate(ask())
    with pytest.raises(InvalidRequest, match="its commit wakes"):
        await on_gpus.wake(KV)
    on_gpus.engine.order.clear()
    await on_gpus.publish(2, 1)
    assert on_gpus.engine.order == ["load", "wake", "probe"]
    assert on_gpus.engine.wakes == [{WEIGHTS}, {KV}]
    state = await on_gpus.state()
    assert (state.state, list(state.asleep), state.policy.version) == (READY, [], 1)
    what, response, tags = on_gpus.guard.told[-1]
    assert (what, tags) == ("woke", {KV})
    assert [(d.free_bytes_before, d.free_bytes_after) for d in response.devices] == [(250, 50), (250, 50)]
    await on_gpus.sleep()
    await on_gpus.wake()  # nothing is discarded any more
    assert (await on_gpus.state()).state == READY


async def test_an_update_that_breaks_leaves_the_rest_asleep(on_gpus: Client) -> None:
    await on_gpus.sleep(discard=True)
    await on_gpus.wake(WEIGHTS)
    await on_gpus.join(2)
    await on_gpus.begin(2, 1)
    on_gpus.engine.break_transfer(Unavailable("rank 0 went away"))
    await on_gpus.until(lambda: on_gpus.rollout.life.state == STALE)
    assert list((await on_gpus.state()).asleep) == [KV]
    await on_gpus.sleep(discard=True)  # from there it can be put to sleep again
    assert list((await on_gpus.state()).asleep) == [WEIGHTS, KV]
    await on_gpus.wake(WEIGHTS)
    await on_gpus.publish(3, 1)
    assert len(await on_gpus.generate(ask())) == 3


async def test_too_little_memory_for_keys_and_values_fails_the_commit(on_gpus: Client) -> None:
    await on_gpus.sleep(discard=True)
    await on_gpus.wake(WEIGHTS)
    await on_gpus.join(2)
    await on_gpus.begin(2, 1)
    on_gpus.engine.deliver()
    on_gpus.engine.devices[1].others = 200
    with pytest.raises(Overloaded, match=r"GPU-1: KV need .* are missing"):
        await on_gpus.commit(1)
    state = await on_gpus.state()
    assert (state.state, list(state.asleep)) == (STALE, [KV])
    on_gpus.engine.devices[1].others = 100
    await on_gpus.publish(3, 1)
    assert (await on_gpus.state()).state == READY


async def test_what_sleeps_has_left_its_transfer_group(on_gpus: Client) -> None:
    await on_gpus.sleep()
    await on_gpus.wake()
    with pytest.raises(Conflict, match="epoch 1 was left or broke"):
        await on_gpus.begin(1, 1)
    await on_gpus.publish(2, 1)
    await on_gpus.begin(2, 2)  # where nobody shares the GPUs a group serves more than one publication


async def test_on_shared_gpus_a_group_lasts_for_one_publication(tmp_path: Path) -> None:
    async with make_client(MemoryEngine(gpus=1), tmp_path, shares_gpus=True) as client:
        await client.publish(1, 0)
        assert (await client.state()).state == READY
        with pytest.raises(Conflict, match="epoch 1 was left or broke"):
            await client.begin(1, 1)
        await client.publish(2, 1)
        assert [what for what, _, _ in client.guard.told] == ["woke", "woke"]  # though nothing slept


async def test_a_wake_without_room_touches_nothing(on_gpus: Client) -> None:
    await on_gpus.sleep()
    on_gpus.engine.devices[1].others = 200
    with pytest.raises(Overloaded, match=r"GPU-1: WEIGHTS, KV need .* others the rest"):
        await on_gpus.wake()
    assert on_gpus.engine.wakes == []
    assert (await on_gpus.state()).state == ASLEEP
    on_gpus.engine.devices[1].others = 100
    await on_gpus.wake()
    assert (await on_gpus.state()).state == READY


async def test_a_wake_that_breaks_fails_the_worker(on_gpus: Client) -> None:
    await on_gpus.sleep()
    on_gpus.engine.wake_error = EngineDead("out of memory while it woke")
    with pytest.raises(Unavailable, match="out of memory"):
        await on_gpus.wake()
    assert (await on_gpus.state()).state == FAILED
    with pytest.raises(EngineDead, match="out of memory"):
        await asyncio.wait_for(on_gpus.running, 5)


async def test_a_wake_without_effect_fails_the_worker(on_gpus: Client) -> None:
    await on_gpus.sleep()
    on_gpus.engine.wakes_take_effect = False
    with pytest.raises(Unavailable, match="asleep after the wake"):
        await on_gpus.wake()
    assert (await on_gpus.state()).state == FAILED


async def test_a_stop_in_the_middle_of_a_sleep_is_a_stop(on_gpus: Client) -> None:
    on_gpus.engine.may_move.clear()
    sleep = asyncio.create_task(on_gpus.sleep())
    await on_gpus.until(lambda: on_gpus.engine.sleeps == [False])
    await on_gpus.rollout.drain()
    on_gpus.engine.may_move.set()
    with pytest.raises(Unavailable, match="STOPPING"):
        await sleep
    assert on_gpus.guard.told == []


async def test_a_sleep_that_frees_too_little_fails_the_worker(on_gpus: Client) -> None:
    on_gpus.engine.leak = 90  # of 850, so that less than nine tenths come free
    with pytest.raises(Conflict, match=r"GPU-0: .* came free on the device; at least 90% must"):
        await on_gpus.sleep()
    assert (await on_gpus.state()).state == FAILED
    with pytest.raises(EngineDead, match="came free"):
        await asyncio.wait_for(on_gpus.running, 5)
    assert on_gpus.guard.told == []


async def test_a_sleep_that_keeps_a_little_is_good_enough(on_gpus: Client) -> None:
    on_gpus.engine.leak = 80
    await on_gpus.sleep()
    assert (await on_gpus.state()).state == ASLEEP


async def test_weights_that_changed_in_their_sleep_are_not_served(on_gpus: Client) -> None:
    await on_gpus.sleep()
    on_gpus.engine.probe_logprobs = [-1.0, -2.00001]
    await on_gpus.wake()
    state = await on_gpus.state()
    assert (state.state, list(state.asleep)) == (STALE, [])
    with pytest.raises(Unavailable, match=r"STALE: .*the probe|STALE: .*its probe"):
        await on_gpus.generate(ask())
    on_gpus.engine.probe_logprobs = [-1.0, -2.0]
    await on_gpus.publish(2, 0)
    assert (await on_gpus.state()).state == READY


async def test_what_was_stale_wakes_stale(stale: Client) -> None:
    await stale.sleep()
    assert (await stale.state()).state == ASLEEP
    await stale.wake()
    assert (await stale.state()).state == STALE
    await stale.publish(1, 0)
    await stale.begin(1, 1)
    stale.engine.break_transfer(Unavailable("gone"))
    await stale.until(lambda: stale.rollout.life.state == STALE)
    await stale.sleep()
    await stale.wake()  # on CUDA the model is torn: the probe is not asked
    assert (await stale.state()).state == STALE


async def test_sleep_waits_for_what_runs_and_refuses_what_it_held(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    sleep = asyncio.create_task(ready.sleep())
    await ready.until(lambda: ready.rollout._gate.draining)
    late = ready.asked(ask("late"))
    await ready.until(lambda: ready.rollout._gate.outstanding == 6)
    with pytest.raises(Conflict, match="on its way"):
        await ready.begin(1, 1)
    assert not sleep.done() and len(ready.engine.requests) == 3
    ready.engine.resume()
    assert len(await call) == 3
    await sleep
    with pytest.raises(Unavailable, match="ASLEEP"):
        await late
    assert ready.rollout._gate.outstanding == 0


async def test_work_goes_on_when_it_does_not_end_in_time_for_a_sleep(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    sleep = asyncio.create_task(ready.sleep(deadline=0.1))
    await ready.until(lambda: ready.rollout._gate.draining)
    late = ready.asked(ask("late"))
    with pytest.raises(Expired, match="3 trajectories were still being sampled"):
        await sleep
    assert (await ready.state()).state == READY and ready.engine.sleeps == []
    ready.engine.resume()
    assert len(await call) == len(await late) == 3


async def test_an_update_and_a_sleep_exclude_each_other(ready: Client) -> None:
    await ready.begin(1, 1)
    with pytest.raises(Conflict, match=r"an update is under way \(to version 1\)"):
        await ready.sleep()
    ready.engine.deliver()
    await ready.commit(1)
    await ready.sleep()
    with pytest.raises(Conflict, match="the engine sleeps"):
        await ready.begin(1, 2)
    with pytest.raises(Conflict, match="no update to version 2 is open"):
        await ready.commit(2)
    assert (await ready.state()).state == ASLEEP


async def test_repeated_sleeps_and_wakes_are_no_work(on_gpus: Client) -> None:
    first = await on_gpus.sleep(request_id="s")
    assert await on_gpus.sleep(request_id="s") == first
    assert not (await on_gpus.sleep(discard=True)).devices  # it sleeps already, with its weights kept
    with pytest.raises(Conflict, match="other content"):
        await on_gpus.sleep(request_id="s", discard=True)
    first_wake = await on_gpus.wake(request_id="w")
    assert await on_gpus.wake(request_id="w") == first_wake
    assert not (await on_gpus.wake(WEIGHTS)).devices
    assert on_gpus.engine.sleeps == [False] and on_gpus.engine.wakes == [{WEIGHTS, KV}]
    assert (await on_gpus.state()).state == READY


@pytest.mark.parametrize("method", ["sleep", "wake"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"deadline_seconds": math.nan}, "deadline_seconds"),
        ({"deadline_seconds": 0.0}, "deadline_seconds"),
        ({"tags": [grant_pb2.MEMORY_TAG_OPTIMIZER]}, "OPTIMIZER"),
    ],
)
async def test_a_wrong_sleep_or_wake_is_refused(
    ready: Client, method: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await getattr(ready, method)(**fields)
    assert (await ready.state()).state == READY


async def test_weights_alone_do_not_sleep(ready: Client) -> None:
    with pytest.raises(InvalidRequest, match="sleep together here, got WEIGHTS"):
        await ready.sleep(tags=[WEIGHTS])
    await ready.sleep(tags=[WEIGHTS, KV])


async def test_every_call_that_touches_shared_gpus_shows_its_token(on_gpus: Client) -> None:
    on_gpus.guard.shares_gpus = True
    old = grant_pb2.GrantToken(epoch="e", sequence=6)
    new = grant_pb2.GrantToken(epoch="e", sequence=7)
    join, commit = join_request(2), commit_request(1)
    begin = rollout_pb2.BeginUpdateRequest(request_id="b", epoch=2, policy_version=1, deadline_seconds=1)
    for request in (join, commit, begin):
        request.token.CopyFrom(old)
    for method, request in [("JoinTransfer", join), ("BeginUpdate", begin), ("CommitUpdate", commit)]:
        with pytest.raises(Conflict, match="the latest grant is 7, the token is of 6"):
            await on_gpus.call(method, request)
    for call in (on_gpus.sleep(token=old), on_gpus.wake(token=old), on_gpus.generate(ask(token=old))):
        with pytest.raises(Conflict, match="of 6"):
            await call
    assert on_gpus.engine.joined == [(1, 0)] and on_gpus.engine.sleeps == [] and on_gpus.engine.requests == []
    first = await on_gpus.generate(ask(token=new))
    assert await on_gpus.generate(ask(token=grant_pb2.GrantToken(epoch="f", sequence=7))) == first
    await on_gpus.sleep(token=new)
    assert [(what, tags) for what, _, tags in on_gpus.guard.told] == [("slept", {WEIGHTS, KV})]
    on_gpus.guard.allowed = {WEIGHTS}
    with pytest.raises(Conflict, match="does not name"):
        await on_gpus.wake(token=new)
    assert on_gpus.engine.wakes == []
    state = await on_gpus.state()
    assert (state.shares_gpus, state.token) == (True, new)


async def test_a_wake_that_waited_for_a_sleep_takes_nothing_that_it_gave_up(on_gpus: Client) -> None:
    """Its tags are those that sleep when its turn has come, and they are not granted any more."""
    on_gpus.guard.shares_gpus = True
    token = grant_pb2.GrantToken(epoch="e", sequence=7)
    on_gpus.engine.may_move.clear()
    sleep = asyncio.create_task(on_gpus.sleep(token=token))
    await on_gpus.until(lambda: on_gpus.engine.sleeps == [False])
    wake = asyncio.create_task(on_gpus.wake(token=token))  # without tags: all that sleeps
    await on_gpus.until(lambda: on_gpus.guard.moves == 2)
    on_gpus.engine.may_move.set()
    await sleep
    with pytest.raises(Conflict, match="does not name"):
        await wake
    assert on_gpus.engine.wakes == []
    assert [what for what, _, _ in on_gpus.guard.told] == ["slept"]


async def test_a_wake_whose_deadline_has_passed_touches_nothing(on_gpus: Client) -> None:
    await on_gpus.sleep()
    request = tenant_pb2.WakeRequest(request_id="late", deadline_seconds=1e-9)
    with pytest.raises(Expired, match="nothing was woken"):
        await on_gpus.call("Wake", request)
    assert on_gpus.engine.wakes == []
    await on_gpus.wake()
    assert (await on_gpus.state()).state == READY


async def test_a_sleep_that_could_not_be_told_is_told_by_the_repeat(on_gpus: Client) -> None:
    on_gpus.guard.tell_error = Unavailable("NATS is away")
    with pytest.raises(Unavailable, match="NATS is away"):
        await on_gpus.sleep(request_id="s")
    assert (await on_gpus.state()).state == ASLEEP
    on_gpus.guard.tell_error = None
    await on_gpus.sleep(request_id="s")
    assert [what for what, _, _ in on_gpus.guard.told] == ["slept"]
    assert on_gpus.engine.sleeps == [False]


async def test_a_policy_serves_even_if_its_waking_could_not_be_told(on_gpus: Client) -> None:
    await on_gpus.sleep(discard=True)
    await on_gpus.wake()
    on_gpus.guard.tell_error = Unavailable("NATS is away")
    await on_gpus.publish(2, 1)
    assert (await on_gpus.state()).state == READY


@pytest.mark.parametrize("nats_is_away", [False, True])
async def test_on_shared_gpus_the_engine_starts_once_they_are_granted(tmp_path: Path, nats_is_away: bool) -> None:
    process = ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=tmp_path, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path="nowhere"),
        settings=RolloutConfig(),
    )
    started: list[Any] = []

    async def start_engine(process: Any) -> Engine:
        started.append(process)
        return MemoryEngine()

    rollout = Rollout(process, start_engine)
    guard = Guard()
    guard.shares_gpus = True
    guard.tell_error = Unavailable("NATS is away") if nats_is_away else None
    running = asyncio.create_task(rollout.run(guard))
    try:
        await asyncio.sleep(0.01)
        assert rollout.life.state == STARTING and not started
        guard.may_start.set()
        async with asyncio.timeout(5):
            while rollout.life.state != STALE:
                await rollout.life.wait_change()
        assert len(started) == 1
        assert [(what, tags) for what, _, tags in guard.told] == ([] if nats_is_away else [("woke", {WEIGHTS, KV})])
    finally:
        running.cancel()
        await asyncio.wait({running})
