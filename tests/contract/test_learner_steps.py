"""Forward, TrainStep and Encode over a real channel, in front of ranks that are a twin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2

from services.common import operations
from services.common.errors import Conflict, InvalidRequest, Unavailable
from services.learner import service
from tests.contract.learner_client import (
    DEADLINE_SECONDS,
    Client,
    forward_header,
    sequence,
    served_learner,
    step_requests,
    until,
)
from tests.unit.learner.batches import make_batch, make_header


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served_learner() as served:
        yield served


async def test_forward_answers_each_sequence_under_the_current_policy(client):
    batch = make_batch(50)
    await client.step(make_header(1, batch), batch)
    answers = await client.forward(forward_header(0.5), sequence("a", 3, 8, 6), sequence("b", 9))
    assert list(answers["a"].logprobs) == [0.0, -2.0, -12.0]
    assert list(answers["b"].logprobs) == [0.0]
    assert answers["a"].policy.version == 1
    assert await client.forward(forward_header()) == {}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "ended before its header"),
        ([sequence("a", 1)], "expected the header, got sequence"),
        ([forward_header(), forward_header()], "message 1 of the stream: expected a sequence, got header"),
        ([forward_header(0.0), sequence("a", 1)], "temperature 0.0"),
        ([forward_header(), sequence("a", 1), sequence("a", 2)], "sequence a came twice"),
        ([forward_header(), sequence("a")], "sequence a: 0 tokens; expected 1 to 100"),
        ([forward_header(), sequence("long", *range(101))], "sequence long: 101 tokens; expected 1 to 100"),
    ],
)
async def test_forward_refuses(client, requests, message):
    with pytest.raises(InvalidRequest, match=message):
        await client.forward(*requests)
    assert client.ranks.asked == []


async def test_a_step_raises_the_version_and_a_repeat_gets_the_first_answer(client):
    batch = make_batch(50)
    header = make_header(1, batch, [[0, 1, 2], [3, 4, 5, 6]])
    result = await client.step(header, batch)
    assert result.step_id == result.policy.version == 1
    assert [m.tokens for m in result.updates] == [u.token_count for u in header.updates]
    assert (await client.state()).policy.version == 1
    assert await client.step(header, batch) == result
    second = await client.step(make_header(2, batch), batch)
    assert second.policy.version == 2
    assert await client.step(header, batch) == result  # an older one, too
    assert client.ranks.applied == [1, 2]


async def test_a_repeat_attaches_to_the_step_under_way(client):
    batch = make_batch(50)
    header = make_header(1, batch)
    client.ranks.hold.add("train_step")
    first = asyncio.create_task(client.step(header, batch))
    second = asyncio.create_task(client.step(header, batch))
    await until(lambda: client.ranks.asked)
    client.ranks.release()
    assert await first == await second
    assert client.ranks.applied == [1]


async def test_a_caller_that_goes_away_does_not_stop_the_step(client):
    batch = make_batch(50)
    header = make_header(1, batch)
    client.ranks.hold.add("train_step")
    first = asyncio.create_task(client.step(header, batch))
    await until(lambda: client.ranks.asked)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(client.step(header, batch))
    client.ranks.release()
    assert (await second).policy.version == 1
    assert client.ranks.applied == [1]


async def test_progress_is_heard_at_each_advance_and_while_nothing_advances(client, monkeypatch):
    monkeypatch.setattr(operations, "HEARTBEAT_SECONDS", 0.05)
    batch = make_batch(50)
    client.ranks.hold.add("train_step")
    call = client.peer.stream(
        client.stub.TrainStep, step_requests(make_header(1, batch), batch), deadline_seconds=DEADLINE_SECONDS
    )
    phases = []
    async for message in call:
        if message.HasField("result"):
            break
        phases.append((message.progress.phase, message.progress.done, message.progress.of))
        if len(phases) == 6:
            client.ranks.release()
    assert phases.count(("working", 1, 2)) >= 3


async def test_gaps_and_other_content_are_conflicts(client):
    batch, other = make_batch(50), make_batch(50, seed=1)
    with pytest.raises(Conflict, match="step 2: the policy is version 0; expected 1"):
        await client.step(make_header(2, batch), batch)
    with pytest.raises(Conflict, match="step 0: the policy is version 0"):
        await client.step(make_header(0, batch), batch)
    await client.step(make_header(1, batch), batch)
    with pytest.raises(Conflict, match="step 1: asked before with other content"):
        await client.step(make_header(1, other), other)
    with pytest.raises(Conflict, match="step 1: asked before with other content"):
        await client.step(make_header(1, batch, temperature=0.5), batch)  # the same rows, another objective
    with pytest.raises(Conflict, match="step 3"):
        await client.step(make_header(3, batch), batch)
    assert client.ranks.applied == [1]


async def test_a_step_that_was_refused_or_failed_can_be_asked_again(client):
    batch = make_batch(50)
    header = make_header(1, batch)
    with pytest.raises(InvalidRequest, match="7 trajectories were announced, 6 came"):
        await client.step(header, batch[:-1])
    with pytest.raises(InvalidRequest, match="digest of what came"):
        await client.step(header, [*batch[1:], batch[0]])
    with pytest.raises(InvalidRequest, match="expected a trajectory, got header"):
        requests = [learner_pb2.TrainStepRequest(header=header)] * 2
        await client.result(client.stub.TrainStep, iter(requests))
    client.ranks.errors["train_step"] = InvalidRequest("3 Updates in a row had no finite gradient; trajectories a, b")
    with pytest.raises(InvalidRequest, match="trajectories a, b"):
        await client.step(header, batch)
    assert (await client.step(header, batch)).policy.version == 1
    assert client.ranks.applied == [1]


async def test_a_rank_that_dies_in_a_step_is_told_and_the_parent_lives_to_tell_it(client):
    batch = make_batch(50)
    client.ranks.hold.add("train_step")
    step = asyncio.create_task(client.step(make_header(1, batch), batch))
    await until(lambda: client.ranks.asked)
    client.ranks.lose("rank 1 (pid 41) was killed by SIGKILL; log: /logs/rank1.log")
    with pytest.raises(Unavailable, match=r"rank 1 .* log: /logs/rank1.log"):
        await step
    state = await client.state()
    assert state.state == tenant_pb2.WORKER_STATE_FAILED and state.policy.version == 0
    for call in (
        client.step(make_header(1, batch), batch),
        client.forward(forward_header(), sequence("a", 1)),
        client.join(1),
        client.publish(1, 0, "p"),
        client.export("/x", "e"),
    ):
        with pytest.raises(Unavailable, match="rank 1"):
            await call


async def test_encode_answers_in_the_order_asked(client):
    conversations = [
        chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(role="user", content=text)]) for text in ("ab", "c")
    ]
    request = learner_pb2.EncodeRequest(conversations=conversations)
    response = await client.peer.call(client.stub.Encode, request, deadline_seconds=DEADLINE_SECONDS)
    assert [list(e.ids) for e in response.encoded] == [[97, 98], [99]]
    client.ranks.errors["encode"] = InvalidRequest("the chat template refuses it")
    with pytest.raises(InvalidRequest, match="template refuses"):
        await client.peer.call(client.stub.Encode, request, deadline_seconds=DEADLINE_SECONDS)


async def test_a_stream_beyond_the_limit_is_refused(client, monkeypatch):
    monkeypatch.setattr(service, "MOST_FORWARD_BYTES", 100)
    with pytest.raises(InvalidRequest, match="beyond 100 bytes"):
        await client.forward(forward_header(), *(sequence(str(number), 1) for number in range(20)))


@pytest.mark.parametrize("name", ["reference_logprobs", "returns"])
async def test_every_value_that_is_not_finite_is_named(client, name):
    batch = make_batch(50)
    getattr(batch[1], name).extend([float("nan")] * len(batch[1].token_ids))
    with pytest.raises(InvalidRequest, match=name):
        await client.step(make_header(1, batch), batch)
