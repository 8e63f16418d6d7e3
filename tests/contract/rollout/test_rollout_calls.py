"""RolloutService over a real channel with an engine in memory: sampling, and what holds at any time."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, trajectory_pb2
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from services.common.server import Server
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.engine import EngineDead
from services.rollout.rollout import Rollout
from services.rollout.seeds import sample_seed
from services.rollout.states import FAILED, READY, STALE, UPDATING
from tests.contract.rollout.rollout_client import DEADLINE, Client
from tests.contract.rollout.rollout_guard import Guard
from tests.contract.rollout.rollout_requests import ask, commit_request, join_request
from tests.unit.rollout.memory_engine import MemoryEngine, token_at

# Generate


async def test_generate_streams_whole_trajectories(ready: Client) -> None:
    found = {trajectory.sample_number: trajectory for trajectory in await ready.generate(ask(first_sample_number=4))}
    assert sorted(found) == [4, 5, 6]
    for number, trajectory in found.items():
        seed = sample_seed(9, PromptId(dataset="train", row=5, epoch=1), number, 0)
        tokens = [token_at(seed, position) for position in range(4)]
        assert trajectory.prompt_id == PromptId(dataset="train", row=5, epoch=1)
        assert list(trajectory.token_ids) == [10, 11, *tokens]
        assert list(trajectory.loss_mask) == [False, False, True, True, True, True]
        assert list(trajectory.behavior_logprobs) == pytest.approx([0, 0, *(-(token + 1) / 100 for token in tokens)])
        assert trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert [(s.start, s.end, s.policy_version) for s in trajectory.version_spans] == [(2, 6, 0)]
        assert (trajectory.seed, trajectory.worker_id) == (seed, "rollout-0")
    asked = ready.engine.requests[0]
    assert (asked.temperature, asked.max_tokens, list(asked.stop_token_ids), asked.policy_version) == (1.0, 4, [2], 0)


async def test_a_repeat_gets_the_first_answer(ready: Client) -> None:
    first = await ready.generate(ask())
    again = await ready.generate(ask())
    assert again == first and len(first) == 3
    assert len(ready.engine.requests) == 3  # nothing was sampled twice


async def test_a_repeat_attaches_to_the_call_under_way(ready: Client) -> None:
    ready.engine.pause()
    one = ready.asked(ask())
    await ready.engine.until_running(3)
    two = ready.asked(ask())
    await ready.until(lambda: ready.rollout.generations._known["r"].listeners == 2)
    ready.engine.resume()
    assert await one == await two
    assert len(ready.engine.requests) == 3


async def test_the_same_id_with_other_content_is_a_conflict(ready: Client) -> None:
    await ready.generate(ask())
    with pytest.raises(Conflict, match="asked before with other content"):
        await ready.generate(ask(run_seed=10))


async def test_a_cancelled_call_frees_the_engine(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    call.cancel()
    await ready.until(lambda: len(ready.engine.cancelled) == 3)
    await ready.until(lambda: ready.rollout._gate.outstanding == 0)
    ready.engine.resume()
    assert len(await ready.generate(ask())) == 3  # the id is free again


async def test_a_cancelled_call_leaves_another_caller_alone(ready: Client) -> None:
    ready.engine.pause()
    one, two = ready.asked(ask()), ready.asked(ask())
    await ready.engine.until_running(3)
    await ready.until(lambda: ready.rollout.generations._known["r"].listeners == 2)
    one.cancel()
    await ready.until(lambda: ready.rollout.generations._known["r"].listeners == 1)
    ready.engine.resume()
    assert len(await two) == 3
    assert ready.engine.cancelled == []


async def test_another_version_than_asked_for_is_a_conflict(ready: Client) -> None:
    assert len(await ready.generate(ask("zero", policy_version=0))) == 3
    with pytest.raises(Conflict, match="version 1 was asked for; this worker serves 0"):
        await ready.generate(ask("one", policy_version=1))


async def test_too_much_at_a_time_is_overloaded(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask("first", samples=18))
    await ready.engine.until_running(18)
    with pytest.raises(Overloaded) as caught:
        await ready.generate(ask("second"))
    assert caught.value.retry_after_seconds == 1.0
    ready.engine.resume()
    assert len(await call) == 18
    assert len(await ready.generate(ask("second"))) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"samples": 0}, "samples must be from 1 to 1024, it is 0"),
        ({"samples": 1025}, "it is 1025"),
        ({"first_sample_number": -1}, "first_sample_number must be at least 0"),
        ({"prompt_id": PromptId(row=1)}, "dataset is empty"),
        ({"prompt_id": PromptId(dataset="d", row=-1)}, "row -1"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [5, 100]}, r"prompt_token_ids: \[100\] not in the vocabulary of 100"),
        ({"prompt_token_ids": [5, -1]}, r"\[-1\] not in the vocabulary"),
        ({"stop_token_ids": [100]}, r"stop_token_ids: \[100\]"),
        ({"stop_strings": ["a", ""]}, "stop_strings: 1 has 0 characters"),
        ({"stop_strings": ["a" * 1001]}, "stop_strings: 0 has 1001 characters"),
        ({"stop_strings": ["a"] * 17}, "17 stop_strings; at most 16"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 31}, "2 .* 31 = 33 tokens; the engine takes 32: .* at most 30"),
        ({"temperature": -0.5}, "temperature must be 0"),
        ({"temperature": 0.001}, "temperature must be 0"),
        ({"temperature": 2.5}, "temperature must be 0"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
    ],
)
async def test_a_wrong_field_never_reaches_the_engine(ready: Client, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await ready.generate(ask(**fields))
    assert ready.engine.requests == []


async def test_edges_of_what_is_allowed(ready: Client) -> None:
    for i, fields in enumerate([{"max_tokens": 30}, {"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 2.0}]):
        assert len(await ready.generate(ask(f"edge-{i}", **fields))) == 3


# Abort


async def test_abort_ends_streams_with_what_was_sampled(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    other = ready.asked(ask("other"))
    await ready.engine.until_running(6)
    answer = await ready.call("Abort", rollout_pb2.AbortRequest(request_ids=["r", "unknown"]))
    assert answer.aborted == 3
    for trajectory in await call:
        assert trajectory.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        assert (len(trajectory.token_ids), sum(trajectory.loss_mask)) == (4, 2)
    ready.engine.resume()
    assert {t.finish_reason for t in await other} == {trajectory_pb2.FINISH_REASON_LENGTH}
    again = await ready.call("Abort", rollout_pb2.AbortRequest(request_ids=["r", "other"]))
    assert again.aborted == 0


async def test_abort_of_held_requests_gives_the_bare_prompt(ready: Client) -> None:
    await ready.begin(1, 1)
    call = ready.asked(ask())
    await ready.until(lambda: ready.rollout._gate.outstanding == 3)
    answer = await ready.call("Abort", rollout_pb2.AbortRequest(request_ids=["r"]))
    assert answer.aborted == 3
    found = await call
    assert sorted(t.sample_number for t in found) == [0, 1, 2]
    assert {tuple(t.token_ids) for t in found} == {(10, 11)}
    assert {t.finish_reason for t in found} == {trajectory_pb2.FINISH_REASON_ABORTED}


# Encode


async def test_encode_uses_the_engines_template(ready: Client) -> None:
    message = chat_pb2.ChatMessage(role="user", content="abc")
    request = rollout_pb2.EncodeRequest(conversations=[chat_pb2.Conversation(messages=[message, message])])
    answer = await ready.call("Encode", request)
    assert [list(encoded.ids) for encoded in answer.encoded] == [[3, 3]]
    with pytest.raises(InvalidRequest, match="template refuses"):
        await ready.call("Encode", rollout_pb2.EncodeRequest(conversations=[chat_pb2.Conversation()]))


# GetState


async def test_state_through_a_life(stale: Client) -> None:
    state = await stale.state()
    assert state.state == STALE and not state.HasField("policy")
    assert (state.backend, state.transfer_ranks, state.max_sequence_tokens) == ("memory 1", 1, 32)
    assert state.dtype == "float32" and 4242 in state.pids and len(state.pids) == 2
    await stale.join(1)
    await stale.begin(1, 3)
    assert (await stale.state()).state == UPDATING
    stale.engine.deliver()
    await stale.commit(3)
    state = await stale.state()
    assert (state.state, state.policy) == (READY, Policy(version=3, digest=77))


async def test_everything_is_unavailable_while_the_engine_starts(tmp_path: Path) -> None:
    process = ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=tmp_path, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path="nowhere"),
        settings=RolloutConfig(),
    )
    rollout = Rollout(process, lambda _: asyncio.get_running_loop().create_future())
    server = Server("127.0.0.1", 0, rollout.health_check)
    guard = Guard()
    service.add_to(server, rollout, guard)
    await server.start()
    running = asyncio.create_task(rollout.run())
    client = Client(rollout, MemoryEngine(), Peer("rollout-0", server.address), running, guard)
    try:
        for method, request in [
            ("GetState", tenant_pb2.GetStateRequest()),
            ("JoinTransfer", join_request(1)),
            ("BeginUpdate", rollout_pb2.BeginUpdateRequest(request_id="b", deadline_seconds=1)),
            ("CommitUpdate", commit_request(1)),
            ("Sleep", tenant_pb2.SleepRequest(request_id="s", deadline_seconds=1)),
            ("Wake", tenant_pb2.WakeRequest(request_id="w", deadline_seconds=1)),
            ("Encode", rollout_pb2.EncodeRequest()),
            ("Abort", rollout_pb2.AbortRequest()),
        ]:
            with pytest.raises(Unavailable, match="STARTING: the engine is starting"):
                await client.call(method, request)
        with pytest.raises(Unavailable, match="STARTING"):
            await client.generate(ask())
        assert "STARTING" in str(await rollout.health_check())
    finally:
        running.cancel()
        await server.stop()


# The end


async def test_a_dead_engine_fails_everything_and_ends_the_worker(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    ready.engine.die()
    with pytest.raises(Unavailable, match="dead"):
        await call
    with pytest.raises(EngineDead, match="dead"):
        await asyncio.wait_for(ready.running, 5)
    assert (await ready.state()).state == FAILED
    assert "FAILED" in str(await ready.rollout.health_check())
    with pytest.raises(Unavailable, match="FAILED"):
        await ready.generate(ask("next"))


async def test_draining_ends_calls_and_the_engine(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    await ready.rollout.drain()
    with pytest.raises(Unavailable, match="stopping"):
        await call
    assert ready.engine.closed
    with pytest.raises(Unavailable, match="STOPPING"):
        await ready.generate(ask("next"))


# Hostile requests


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"first_sample_number": 2**31 - 2}, "first_sample_number"),
        ({"stop_token_ids": [2] * 1025}, "stop_token_ids"),
        ({"request_id": "x" * 1001}, "request_id has 1001"),
        ({"prompt_id": PromptId(dataset="x" * 1001)}, "prompt_id.dataset has 1001"),
    ],
)
async def test_what_would_overflow_or_be_remembered_is_refused(
    ready: Client, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await ready.generate(ask(**fields))
    assert len(await ready.generate(ask("after"))) == 3


async def test_abort_counts_an_id_named_twice_once(ready: Client) -> None:
    ready.engine.pause()
    asked = ready.asked(ask("twice"))
    await ready.engine.until_running(3)
    answer = await ready.call("Abort", rollout_pb2.AbortRequest(request_ids=["twice", "twice"]))
    assert answer.aborted == 3
    assert len(await asked) == 3


async def test_bytes_that_are_no_message_are_an_invalid_request(stale: Client) -> None:
    name = "/antiphon.rollout.v1.RolloutService"
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stale.channel.unary_unary(f"{name}/Encode")(b"\xff\xff", timeout=DEADLINE)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        _ = [answer async for answer in stale.channel.unary_stream(f"{name}/Generate")(b"\xff", timeout=DEADLINE)]
    assert unary.value.code() == stream.value.code() == grpc.StatusCode.INVALID_ARGUMENT
