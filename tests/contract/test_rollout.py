"""RolloutService and TenantService over a real channel, every RPC, with an engine in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, trajectory_pb2, transfer_pb2
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId, Trajectory

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.common.server import Server
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, EngineDead, Unmatched
from services.rollout.rollout import Rollout
from services.rollout.seeds import sample_seed
from services.rollout.states import FAILED, READY, STALE, UPDATING
from tests.unit.rollout.memory_engine import MemoryEngine, token_at

DEADLINE = 10.0


class Client:
    """A worker and a channel to it."""

    def __init__(self, rollout: Rollout, engine: MemoryEngine, peer: Peer, running: asyncio.Task[None]) -> None:
        self.rollout = rollout
        self.engine = engine
        self.running = running
        self._peer = peer
        self.channel = peer.channel
        self._rollout_stub = rollout_pb2_grpc.RolloutServiceStub(peer.channel)
        self._tenant_stub = tenant_pb2_grpc.TenantServiceStub(peer.channel)
        self._counter = 0

    async def call(self, method: str, request: Any) -> Any:
        stub = self._tenant_stub if method == "GetState" else self._rollout_stub
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

    async def publish(self, epoch: int, version: int) -> None:
        await self.join(epoch)
        await self.begin(epoch, version)
        self.engine.deliver()
        await self.commit(version)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)


def join_request(epoch: int, *, rank: int = 0, receivers: int = 1, names: tuple[str, ...] = ("w",)) -> Any:
    manifest = transfer_pb2.TransferManifest(epoch=epoch, address="127.0.0.1:1", receiver_ranks=receivers)
    for name in names:
        manifest.tensors.add(name=name, shape=[1])
    return rollout_pb2.JoinTransferRequest(request_id="j", manifest=manifest, first_receiver_rank=rank)


def commit_request(version: int, *, digest: int = 77, request_id: str = "c", **fields: Any) -> Any:
    return rollout_pb2.CommitUpdateRequest(
        **{
            "request_id": request_id,
            "policy": Policy(version=version, digest=digest),
            "probe_token_ids": [1, 2, 3],
            "probe_logprobs": [-1.0, -2.0],
            "probe_tolerance": 1e-3,
            **fields,
        }
    )


def ask(request_id: str = "r", **fields: Any) -> rollout_pb2.GenerateRequest:
    """Three trajectories of four tokens for a prompt of two."""
    temperature = fields.pop("temperature", 1.0)
    max_tokens = fields.pop("max_tokens", 4)
    stop_token_ids = fields.pop("stop_token_ids", [2])
    return rollout_pb2.GenerateRequest(
        **{
            "request_id": request_id,
            "prompt_id": PromptId(dataset="train", row=5, epoch=1),
            "prompt_token_ids": [10, 11],
            "samples": 3,
            "run_seed": 9,
            "sampling": rollout_pb2.Sampling(
                temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            ),
            **fields,
        }
    )


@asynccontextmanager
async def make_client(engine: MemoryEngine, folder: Path, **settings: Any) -> AsyncIterator[Client]:
    process = ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=folder, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path="nowhere", dtype="float32"),
        settings=RolloutConfig(**{"max_outstanding": 20, **settings}),
    )

    async def start_engine(_: Any) -> Engine:
        return engine

    rollout = Rollout(process, start_engine)
    server = Server("127.0.0.1", 0, rollout.health_check)
    service.add_to(server, rollout)
    await server.start()
    running = asyncio.create_task(rollout.run())
    peer = Peer("rollout-0", server.address)
    client = Client(rollout, engine, peer, running)
    await client.until(lambda: rollout.life.state == STALE)
    yield client
    await peer.close()
    await server.stop()
    running.cancel()
    await asyncio.wait({running})


@pytest.fixture
async def stale(tmp_path: Path) -> AsyncIterator[Client]:
    async with make_client(MemoryEngine(), tmp_path) as client:
        yield client


@pytest.fixture
async def ready(stale: Client) -> Client:
    await stale.publish(1, 0)
    return stale


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
    await ready.until(lambda: ready.rollout.generations._known["r"].callers == 2)
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
    await ready.until(lambda: ready.rollout.generations._known["r"].callers == 2)
    one.cancel()
    await ready.until(lambda: ready.rollout.generations._known["r"].callers == 1)
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
    service.add_to(server, rollout)
    await server.start()
    running = asyncio.create_task(rollout.run())
    client = Client(rollout, MemoryEngine(), Peer("rollout-0", server.address), running)
    try:
        for method, request in [
            ("GetState", tenant_pb2.GetStateRequest()),
            ("JoinTransfer", join_request(1)),
            ("BeginUpdate", rollout_pb2.BeginUpdateRequest(request_id="b", deadline_seconds=1)),
            ("CommitUpdate", commit_request(1)),
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


# Updates


async def test_a_stale_worker_refuses_to_generate(stale: Client) -> None:
    with pytest.raises(Unavailable, match=r"STALE: .*no policy was published yet"):
        await stale.generate(ask())
    assert stale.engine.requests == []
    assert await stale.rollout.health_check() is None  # healthy: it waits for a publication


async def test_commit_tells_what_the_update_cost(stale: Client) -> None:
    await stale.join(1)
    await stale.begin(1, 0)
    stale.engine.deliver(size=12345)
    stale.engine.probe_logprobs = [-1.0002, -2.0004]
    answer = await stale.commit(0)
    assert (answer.bytes, answer.transfer_seconds) == (12345, 0.5)
    assert answer.probe_difference == pytest.approx(3e-4, rel=1e-3)
    assert 0 <= answer.load_seconds <= answer.pause_seconds < 5
    assert stale.engine.loads == 1


async def test_requests_are_held_during_an_update_and_get_the_new_version(ready: Client) -> None:
    await ready.begin(1, 1)
    held = ready.asked(ask())
    await ready.until(lambda: ready.rollout._gate.outstanding == 3)
    assert ready.engine.requests == []
    ready.engine.deliver()
    await ready.commit(1)
    found = await held
    assert {span.policy_version for t in found for span in t.version_spans} == {1}
    seeds = {sample_seed(9, PromptId(dataset="train", row=5, epoch=1), number, 1) for number in range(3)}
    assert {t.seed for t in found} == seeds
    assert {request.policy_version for request in ready.engine.requests} == {1}


async def test_held_requests_are_refused_when_the_update_fails(ready: Client) -> None:
    await ready.begin(1, 1)
    held = ready.asked(ask())
    await ready.until(lambda: ready.rollout._gate.outstanding == 3)
    ready.engine.break_transfer(Unavailable("rank 0 went away"))
    with pytest.raises(Unavailable, match=r"STALE: .*rank 0 went away"):
        await held
    assert ready.rollout._gate.outstanding == 0


async def test_held_requests_count_against_the_bound(ready: Client) -> None:
    await ready.begin(1, 1)
    held = ready.asked(ask("held", samples=20))
    await ready.until(lambda: ready.rollout._gate.outstanding == 20)
    with pytest.raises(Overloaded):
        await ready.generate(ask("more", samples=1))
    ready.engine.deliver()
    await ready.commit(1)
    assert len(await held) == 20


async def test_begin_waits_until_what_runs_is_finished(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    begin = asyncio.create_task(ready.begin(1, 1))
    await ready.until(lambda: ready.rollout.life.state == UPDATING)
    late = ready.asked(ask("late"))
    await ready.until(lambda: ready.rollout._gate.outstanding == 6)
    assert not begin.done()
    ready.engine.resume()
    assert {span.policy_version for t in await call for span in t.version_spans} == {0}
    await begin
    assert len(ready.engine.requests) == 3
    ready.engine.deliver()
    await ready.commit(1)
    assert {span.policy_version for t in await late for span in t.version_spans} == {1}


async def test_begin_gives_up_when_the_engine_is_not_idle_in_time(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    with pytest.raises(Expired, match="3 trajectories were still being sampled"):
        await ready.begin(1, 1, deadline=0.1)
    assert (await ready.state()).state == STALE
    ready.engine.resume()
    assert len(await call) == 3  # what ran was sampled by the verified policy


@pytest.mark.parametrize(
    ("digest", "probe", "message"),
    [
        (78, [-1.0, -2.0], "digest of what arrived is 0x000000000000004e"),
        (77, [-1.01, -2.01], r"off by 0\.01 in the mean, 0\.001 is allowed"),
        (77, [math.nan, -2.0], "off by nan"),
    ],
)
async def test_what_is_not_verified_is_not_served(ready: Client, digest: int, probe: list[float], message: str) -> None:
    await ready.begin(1, 1)
    held = ready.asked(ask())
    ready.engine.deliver(digest=digest)
    ready.engine.probe_logprobs = probe
    with pytest.raises(Conflict, match=message):
        await ready.commit(1)
    state = await ready.state()
    assert (state.state, state.policy.version) == (STALE, 0)
    with pytest.raises(Unavailable, match="STALE"):
        await held
    assert ready.engine.loads == (1 if digest == 78 else 2)  # version 0, and 1 only if the digest was right
    with pytest.raises(Conflict, match="Join a new epoch first"):
        await ready.begin(1, 1)
    ready.engine.probe_logprobs = [-1.0, -2.0]
    await ready.publish(2, 1)
    assert len(await ready.generate(ask("after"))) == 3


async def test_a_broken_transfer_is_expired_and_the_next_publication_works(ready: Client) -> None:
    await ready.begin(1, 1)
    ready.engine.break_transfer(Unavailable("bucket 3 of 9"))
    await ready.until(lambda: ready.rollout.life.state == STALE)
    with pytest.raises(Expired, match="the transfer of version 1 broke: bucket 3 of 9"):
        await ready.commit(1)
    assert (await ready.state()).policy.version == 0
    assert ready.engine.given_up == 1
    await ready.publish(2, 1)
    assert (await ready.state()).policy.version == 1


async def test_the_same_version_may_be_published_again(ready: Client) -> None:
    await ready.publish(1, 0)
    await ready.publish(2, 0)
    assert ready.engine.loads == 3
    assert (await ready.state()).policy.version == 0


async def test_nobody_commits(tmp_path: Path) -> None:
    async with make_client(MemoryEngine(), tmp_path, commit_seconds=0.1) as client:
        await client.join(1)
        await client.begin(1, 0)
        client.engine.deliver()
        await client.until(lambda: client.rollout.life.state == STALE)
        with pytest.raises(Expired, match="nobody committed it"):
            await client.commit(0)


async def test_a_newer_epoch_ends_an_open_update(ready: Client) -> None:
    await ready.begin(1, 1)
    await ready.join(2)
    assert (await ready.state()).state == STALE
    with pytest.raises(Unavailable, match="epoch 2 began"):
        await ready.commit(1)
    await ready.begin(2, 1)
    ready.engine.deliver()
    await ready.commit(1)


async def test_a_second_begin_gives_the_first_up(ready: Client) -> None:
    await ready.begin(1, 1)
    with pytest.raises(Conflict, match="epoch 1 was left or broke"):
        await ready.begin(1, 1)
    assert (await ready.state()).state == STALE


async def test_begin_and_commit_are_idempotent_by_request_id(ready: Client) -> None:
    await ready.begin(1, 1, request_id="b")
    await ready.begin(1, 1, request_id="b")
    with pytest.raises(Conflict, match="other content"):
        await ready.begin(1, 2, request_id="b")
    ready.engine.deliver(size=9)
    first = await ready.call("CommitUpdate", commit_request(1, request_id="same"))
    again = await ready.call("CommitUpdate", commit_request(1, request_id="same"))
    assert first == again and ready.engine.loads == 2
    with pytest.raises(Conflict, match="other content"):
        await ready.call("CommitUpdate", commit_request(1, request_id="same", digest=5))


async def test_commit_conflicts(ready: Client) -> None:
    with pytest.raises(Conflict, match="no update to version 1 is open"):
        await ready.commit(1)
    assert (await ready.state()).state == READY  # a stray commit does no harm
    await ready.begin(1, 1)
    with pytest.raises(Conflict, match="version 2; the open update is to 1"):
        await ready.commit(2)
    assert (await ready.state()).state == STALE


async def test_a_cancelled_commit_goes_on(ready: Client) -> None:
    await ready.begin(1, 1)
    call = asyncio.create_task(ready.call("CommitUpdate", commit_request(1)))
    update = ready.rollout.updates._open
    assert update is not None
    await asyncio.wait_for(update.committing.wait(), 5)
    call.cancel()
    ready.engine.deliver()
    await ready.until(lambda: ready.rollout.life.state == READY)
    assert (await ready.call("CommitUpdate", commit_request(1))).bytes == 1000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probe_token_ids": [1]}, "must have 2 to 31 tokens, it has 1"),
        ({"probe_logprobs": [-1.0]}, "1 probe_logprobs for 3 tokens"),
        ({"probe_logprobs": [-1.0, math.nan]}, "must be finite"),
        ({"probe_token_ids": [1, 2, 100]}, "not in the vocabulary"),
        ({"probe_tolerance": 0.0}, "probe_tolerance"),
    ],
)
async def test_a_wrong_commit_leaves_the_update_open(ready: Client, fields: dict[str, Any], message: str) -> None:
    await ready.begin(1, 1)
    ready.engine.deliver()
    with pytest.raises(InvalidRequest, match=message):
        await ready.commit(1, **fields)
    await ready.commit(1)


@pytest.mark.parametrize("deadline", [0.0, -1.0, math.inf, math.nan])
async def test_a_begin_without_a_deadline_is_refused(ready: Client, deadline: float) -> None:
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        await ready.begin(1, 1, deadline=deadline)
    assert (await ready.state()).state == READY


# JoinTransfer


async def test_unmatched_names_are_answered_and_nothing_is_joined(ready: Client) -> None:
    ready.engine.found = Unmatched(("a", "b"), ("c",), ("d: expected shape [2], got [3]",))
    answer = await ready.join(2)
    assert list(answer.unknown_tensors) == ["a", "b"]
    assert list(answer.missing_tensors) == ["c"]
    assert list(answer.differing_tensors) == ["d: expected shape [2], got [3]"]
    assert ready.engine.joined == [(1, 0)]
    await ready.begin(1, 1)  # the older group is still there


async def test_join_is_idempotent_by_epoch_and_refuses_older_ones(ready: Client) -> None:
    await ready.join(3, rank=1, receivers=2)
    await ready.join(3, rank=1, receivers=2)
    assert ready.engine.joined == [(1, 0), (3, 1)]
    with pytest.raises(Conflict, match="other content"):
        await ready.join(3, rank=0, receivers=2)
    with pytest.raises(Conflict, match="epoch 2 is over; this worker is in epoch 3"):
        await ready.join(2)


async def test_a_join_that_fails_leaves_the_policy_served(ready: Client) -> None:
    ready.engine.join_error = Unavailable("not everybody came")
    with pytest.raises(Unavailable, match="not everybody came"):
        await ready.join(2)
    assert len(await ready.generate(ask())) == 3
    with pytest.raises(Conflict, match="epoch 2 was left or broke"):
        await ready.begin(2, 1)
    ready.engine.join_error = None
    await ready.join(2)  # a failed join is not remembered
    await ready.begin(2, 1)


async def test_a_rank_outside_the_manifest_is_refused(ready: Client) -> None:
    for rank in (-1, 1):
        with pytest.raises(InvalidRequest, match="are not among the manifest's 1"):
            await ready.join(2, rank=rank)


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


async def test_a_torn_model_is_a_dead_engine(ready: Client) -> None:
    await ready.begin(1, 1)
    ready.engine.deliver()
    ready.engine.load_error = EngineDead("the model is torn")
    with pytest.raises(Unavailable, match="torn"):
        await ready.commit(1)
    assert (await ready.state()).state == FAILED


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


@pytest.mark.parametrize("deadline", [math.nan, math.inf, 1e300, -1.0])
async def test_begin_update_refuses_a_deadline_that_no_clock_holds(stale: Client, deadline: float) -> None:
    await stale.join(1)
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        await stale.begin(1, 0, deadline=deadline)


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
