"""RolloutService and TenantService over a real channel, every RPC, with an engine in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, grant_pb2, trajectory_pb2, transfer_pb2
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId, Trajectory

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.common.server import Server
from services.rollout import generations, service, updates
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, EngineDead, Unmatched
from services.rollout.rollout import Rollout
from services.rollout.seeds import sample_seed
from services.rollout.states import ASLEEP, FAILED, READY, STALE, STARTING, UPDATING
from tests.unit.rollout.memory_engine import MemoryEngine, token_at

DEADLINE = 10.0
WEIGHTS, KV = grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_KV


class Guard:
    """Stands in for the grants: takes one token, and keeps what it was told."""

    def __init__(self) -> None:
        self.shares_gpus = False
        self.token = grant_pb2.GrantToken()
        self.allowed = {WEIGHTS, KV}
        self.told: list[tuple[str, Any, set[int]]] = []
        self.tell_error: Exception | None = None
        self.may_start = asyncio.Event()
        self.moves = 0
        """Sleeps and Wakes that came so far."""
        self._moving = asyncio.Lock()

    async def granted(self, tags: Collection[grant_pb2.MemoryTag], deadline_seconds: float) -> grant_pb2.GrantToken:
        assert set(tags) == {WEIGHTS, KV} and deadline_seconds > 0
        await self.may_start.wait()
        return self.token

    async def check(self, token: grant_pb2.GrantToken, tags: Collection[grant_pb2.MemoryTag] = ()) -> None:
        if not self.shares_gpus:
            return
        if token.sequence != 7:
            raise Conflict(f"the latest grant is 7, the token is of {token.sequence}")
        if not set(tags) <= self.allowed:
            raise Conflict(f"grant 7 does not name {sorted(set(tags) - self.allowed)}")
        self.token = token

    @asynccontextmanager
    async def moving(
        self, token: grant_pb2.GrantToken, tags: Collection[grant_pb2.MemoryTag] = ()
    ) -> AsyncIterator[None]:
        self.moves += 1
        async with self._moving:
            await self.check(token, tags)
            yield

    async def slept(self, response: tenant_pb2.SleepResponse, tags: Collection[grant_pb2.MemoryTag]) -> None:
        await self._tell("slept", response, tags)
        if self.shares_gpus:
            self.allowed = self.allowed - set(tags)  # given up under this token

    async def woke(self, response: tenant_pb2.WakeResponse, tags: Collection[grant_pb2.MemoryTag]) -> None:
        await self._tell("woke", response, tags)

    async def _tell(self, what: str, response: Any, tags: Collection[grant_pb2.MemoryTag]) -> None:
        if self.tell_error is not None:
            raise self.tell_error
        self.told.append((what, response, set(tags)))


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
    assert 0 <= answer.load_seconds + answer.probe_seconds <= answer.pause_seconds < 5
    assert answer.extra_bytes == 4096
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


# Sleep and Wake


@pytest.fixture
async def on_gpus(tmp_path: Path) -> AsyncIterator[Client]:
    """A worker on two devices, READY with version 0."""
    async with make_client(MemoryEngine(gpus=2), tmp_path) as client:
        await client.publish(1, 0)
        client.guard.told.clear()
        yield client


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


async def test_a_transfer_that_stands_still_ends_with_its_deadline(
    ready: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the engine's workers, who keep the deadline, do not answer: a socket stands still under them."""
    monkeypatch.setattr(updates, "LATE_SECONDS", 0.1)
    await ready.join(2)
    await ready.call(
        "BeginUpdate",
        rollout_pb2.BeginUpdateRequest(request_id="b", epoch=2, policy_version=1, deadline_seconds=0.2),
    )
    held = ready.asked(ask())
    with pytest.raises(Unavailable, match="stands still"):
        await asyncio.wait_for(held, 5)
    assert (await ready.state()).state == STALE


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


async def test_finished_calls_are_forgotten_the_oldest_end_first(
    ready: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "KEEP_CALLS", 3)
    ready.engine.pause()
    running = ready.asked(ask("running", samples=1))
    await ready.engine.until_running(1)
    ready.engine._may_run.set()
    for name in ("a", "b", "c"):
        await ready.generate(ask(name))
    assert set(ready.rollout.generations._known) == {"running", "b", "c"}  # what runs is never forgotten
    sampled = len(ready.engine.requests)
    await ready.generate(ask("c"))
    assert len(ready.engine.requests) == sampled
    await ready.generate(ask("a"))
    assert len(ready.engine.requests) == sampled + 3
    monkeypatch.setattr(generations, "KEEP_SECONDS", 0.0)
    await ready.generate(ask("d"))
    assert set(ready.rollout.generations._known) == {"running", "d"}
    ready.engine.resume()
    assert len(await running) == 1
