"""TenantService of a learner over a real channel: its state, Sleep and Wake, and the token with every call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from antiphon.tenant.v1 import tenant_pb2

from services.common.errors import AntiphonError, Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from tests.contract.learner_client import (
    DEADLINE_SECONDS,
    GIB,
    KV,
    OPTIMIZER,
    TOKEN,
    WEIGHTS,
    Client,
    forward_header,
    sequence,
    served_learner,
    until,
)
from tests.unit.learner.batches import make_batch, make_header


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served_learner() as served:
        yield served


async def test_state(client):
    state = await client.state()
    assert state.state == tenant_pb2.WORKER_STATE_READY
    assert (state.backend, state.dtype, state.max_sequence_tokens, state.transfer_ranks) == (
        "twin 1.0",
        "float32",
        100,
        2,
    )
    assert list(state.pids) == [os.getpid(), 40, 41]
    client.ranks.loading = True
    with pytest.raises(Unavailable, match="the learner does not work yet, or no more: loading"):
        await client.state()
    batch = make_batch(50)
    with pytest.raises(AntiphonError, match="still loading"):
        await client.step(make_header(1, batch), batch)


async def test_what_sleeps_is_refused_by_name_until_it_is_awake(client):
    client.ranks.gpu_bytes = {WEIGHTS: 6 * GIB, OPTIMIZER: 48 * GIB}
    batch = make_batch(50)
    await client.join(1)
    slept = await client.sleep("s1", OPTIMIZER)
    assert [(d.uuid, d.free_bytes_after - d.free_bytes_before) for d in slept.devices] == [
        ("GPU-0", 48 * GIB),
        ("GPU-1", 48 * GIB),
    ]
    state = await client.state()
    assert state.state == tenant_pb2.WORKER_STATE_ASLEEP and list(state.asleep) == [OPTIMIZER]
    assert state.shares_gpus and state.token == TOKEN
    assert [{part.tag: part.bytes for part in device.held} for device in state.devices] == [
        {WEIGHTS: 6 * GIB, OPTIMIZER: 0}
    ] * 2
    with pytest.raises(Conflict, match="step 1: OPTIMIZER sleeps; wake it first"):
        await client.step(make_header(1, batch), batch)
    assert (await client.publish(1, 0, "p")).policy.version == 0  # needs the weights alone
    assert await client.forward(forward_header(), sequence("a", 1))

    await client.sleep("s2")
    assert list((await client.state()).asleep) == [WEIGHTS, OPTIMIZER]
    for call, what in (
        (client.step(make_header(1, batch), batch), "step 1: WEIGHTS and OPTIMIZER sleeps"),
        (client.forward(forward_header(), sequence("a", 1)), "forward: WEIGHTS sleeps"),
        (client.join(2), "epoch 2: WEIGHTS sleeps"),
        (client.publish(1, 0, "q"), "publish version 0: WEIGHTS sleeps"),
        (client.export("/x", "e"), "export to /x: WEIGHTS sleeps"),
    ):
        with pytest.raises(Conflict, match=what):
            await call

    woke = await client.wake("w1", WEIGHTS)
    assert [d.free_bytes_before - d.free_bytes_after for d in woke.devices] == [6 * GIB] * 2
    assert await client.forward(forward_header(), sequence("a", 1))
    await client.wake("w2")
    assert (await client.state()).state == tenant_pb2.WORKER_STATE_READY
    assert (await client.step(make_header(1, batch), batch)).policy.version == 1
    said = [
        ("slept", [OPTIMIZER]),
        ("slept", [WEIGHTS, OPTIMIZER]),
        ("woke", [WEIGHTS]),
        ("woke", [WEIGHTS, OPTIMIZER]),
    ]
    assert client.guard.said == said


async def test_sleep_and_wake_are_done_once_for_each_request(client):
    client.ranks.gpu_bytes = {WEIGHTS: GIB, OPTIMIZER: GIB}
    first = await client.sleep("s")
    assert await client.sleep("s") == first
    assert client.ranks.asked.count("sleep") == 1
    again = await client.sleep("t")  # another request finds nothing to do
    assert [d.free_bytes_after - d.free_bytes_before for d in again.devices] == [0, 0]
    with pytest.raises(Conflict, match="sleep s: asked before with other content"):
        await client.sleep("s", WEIGHTS)
    woke = await client.wake("w")
    assert await client.wake("w") == woke
    with pytest.raises(InvalidRequest, match="request_id is empty"):
        await client.sleep("")


async def test_without_a_gpu_the_state_alone_changes(client):
    assert list((await client.sleep("s")).devices) == []
    assert list((await client.state()).asleep) == [WEIGHTS, OPTIMIZER]
    with pytest.raises(Conflict, match="WEIGHTS sleeps"):
        await client.forward(forward_header(), sequence("a", 1))
    await client.wake("w")
    assert (await client.state()).state == tenant_pb2.WORKER_STATE_READY


async def test_a_learner_has_no_kv_and_never_discards_its_weights(client):
    for call in (client.sleep("s", KV), client.wake("w", WEIGHTS, KV)):
        with pytest.raises(InvalidRequest, match="a learner has no KV; expected WEIGHTS and OPTIMIZER"):
            await call
    request = tenant_pb2.SleepRequest(request_id="s", discard_weights=True)
    with pytest.raises(InvalidRequest, match="discard_weights"):
        await client.peer.call(client.tenant.Sleep, request, deadline_seconds=DEADLINE_SECONDS)
    assert client.ranks.asked == []


async def test_sleep_waits_for_the_work_under_way_until_its_deadline(client):
    batch = make_batch(50)
    client.ranks.hold.add("train_step")
    step = asyncio.create_task(client.step(make_header(1, batch), batch))
    await until(lambda: client.ranks.asked)
    with pytest.raises(Expired, match="sleep: the work under way did not end within 0 s; nothing changed"):
        await client.sleep("s", deadline=0.1)
    sleep = asyncio.create_task(client.sleep("t"))
    later = asyncio.create_task(client.step(make_header(2, batch), batch))  # it comes behind the sleep, or before it
    await asyncio.sleep(0.05)
    assert not sleep.done()
    client.ranks.release()
    await step
    await sleep
    with pytest.raises(Conflict, match="step 2: WEIGHTS and OPTIMIZER sleeps"):
        await later
    assert client.ranks.applied == [1]


async def test_memory_that_does_not_come_free_ends_the_ranks_and_says_both_numbers(client):
    client.ranks.gpu_bytes = {WEIGHTS: 6 * GIB, OPTIMIZER: 48 * GIB}
    client.ranks.stuck_bytes = 6 * GIB
    with pytest.raises(Conflict, match=rf"held {54 * GIB} bytes of GPU-0, but only {48 * GIB} became free"):
        await client.sleep("s")
    assert (await client.state()).state == tenant_pb2.WORKER_STATE_FAILED
    with pytest.raises(Unavailable, match="became free"):
        await client.wake("w")
    assert client.guard.said == []


async def test_a_wake_that_does_not_fit_leaves_all_asleep_and_the_next_one_works(client):
    client.ranks.gpu_bytes = {WEIGHTS: GIB, OPTIMIZER: GIB}
    await client.sleep("s")
    client.ranks.errors["wake"] = Overloaded("wake: 2 bytes are wanted, the driver has 1 free")
    with pytest.raises(Overloaded, match="the driver has 1 free"):
        await client.wake("w")
    assert client.ranks.asked[-1] == "sleep"  # ranks that had room gave it back
    assert list((await client.state()).asleep) == [WEIGHTS, OPTIMIZER]
    await client.wake("w")
    assert list((await client.state()).asleep) == []
    assert client.guard.said == [("slept", [WEIGHTS, OPTIMIZER]), ("woke", [WEIGHTS, OPTIMIZER])]


async def test_a_rank_that_dies_in_a_sleep_is_told(client):
    client.ranks.hold.add("sleep")
    sleep = asyncio.create_task(client.sleep("s"))
    await until(lambda: client.ranks.asked)
    client.ranks.lose("rank 1 (pid 41) was killed by SIGKILL; log: /logs/rank1.log")
    with pytest.raises(Unavailable, match=r"rank 1 .* log: /logs/rank1.log"):
        await sleep
    assert client.guard.said == []


async def test_every_call_that_touches_the_gpus_presents_its_token(client):
    batch = make_batch(50)
    await client.join(1)
    client.guard.stale = True
    client.guard.checked.clear()
    asked = len(client.ranks.asked)
    for call in (
        client.step(make_header(1, batch), batch),
        client.forward(forward_header(), sequence("a", 1)),
        client.join(2),
        client.publish(1, 0, "p"),
        client.export("/x", "e"),
        client.sleep("s"),
        client.wake("w", WEIGHTS),
    ):
        with pytest.raises(Conflict, match="does not hold"):
            await call
    assert [tags for _, tags in client.guard.checked] == [
        [WEIGHTS, OPTIMIZER], [WEIGHTS], [WEIGHTS], [WEIGHTS], [WEIGHTS], [], [WEIGHTS]
    ]  # fmt: skip
    assert client.guard.checked[-1][0] == TOKEN.sequence
    assert len(client.ranks.asked) == asked
