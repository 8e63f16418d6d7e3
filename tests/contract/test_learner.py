"""LearnerService and TenantService over a real channel, in front of ranks that are a twin in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, grant_pb2, transfer_pb2

from services.common import operations
from services.common.client import Peer
from services.common.errors import AntiphonError, Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.common.server import Server
from services.learner import service
from services.learner.learner import Learner
from services.learner.service import LearnerServicer, TenantServicer
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.ranks_twin import DIGEST_OF_VERSION_0, RanksTwin

DEADLINE_SECONDS = 10.0
WEIGHTS, OPTIMIZER, KV = grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_OPTIMIZER, grant_pb2.MEMORY_TAG_KV
TOKEN = grant_pb2.GrantToken(epoch="e", sequence=7)
GIB = 1 << 30


class Client:
    """A learner behind its own server, and a peer that calls it."""

    def __init__(self, ranks: RanksTwin, guard: RecordingGuard, peer: Peer) -> None:
        self.ranks = ranks
        self.guard = guard
        self.peer = peer
        self.stub = learner_pb2_grpc.LearnerServiceStub(peer.channel)
        self.tenant = tenant_pb2_grpc.TenantServiceStub(peer.channel)

    async def result(self, method: Any, request: Any) -> Any:
        """The last message of a progress stream; every one before it is progress."""
        messages = [m async for m in self.peer.stream(method, request, deadline_seconds=DEADLINE_SECONDS)]
        assert [m.WhichOneof("part") for m in messages[:-1]] == ["progress"] * (len(messages) - 1)
        return messages[-1].result

    async def step(self, header: Any, batch: list[Any]) -> learner_pb2.StepResult:
        return await self.result(self.stub.TrainStep, step_requests(header, batch))

    async def join(self, epoch: int, **settings: Any) -> transfer_pb2.TransferManifest:
        request = learner_pb2.JoinTransferRequest(
            epoch=epoch,
            transport=transfer_pb2.TRANSPORT_GLOO,
            receiver_ranks=2,
            bucket_bytes=1 << 20,
            deadline_seconds=5,
        )
        for name, value in settings.items():
            setattr(request, name, value)
        response = await self.peer.call(self.stub.JoinTransfer, request, deadline_seconds=DEADLINE_SECONDS)
        return response.manifest

    async def publish(
        self, epoch: int, version: int, request_id: str, deadline: float = 5.0
    ) -> learner_pb2.PublishResult:
        request = learner_pb2.PublishRequest(
            request_id=request_id, epoch=epoch, policy_version=version, deadline_seconds=deadline
        )
        return await self.result(self.stub.Publish, request)

    async def export(self, path: str, request_id: str) -> learner_pb2.ExportResult:
        return await self.result(self.stub.Export, learner_pb2.ExportRequest(request_id=request_id, path=path))

    async def forward(self, *requests: learner_pb2.ForwardRequest) -> dict[str, learner_pb2.ForwardResponse]:
        answers = self.peer.stream(self.stub.Forward, iter(requests), deadline_seconds=DEADLINE_SECONDS)
        return {answer.id: answer async for answer in answers}

    async def state(self) -> tenant_pb2.GetStateResponse:
        return await self.peer.call(
            self.tenant.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=DEADLINE_SECONDS
        )

    async def sleep(self, request_id: str, *tags: int, deadline: float = 5.0) -> tenant_pb2.SleepResponse:
        request = tenant_pb2.SleepRequest(request_id=request_id, tags=tags, token=TOKEN, deadline_seconds=deadline)
        return await self.peer.call(self.tenant.Sleep, request, deadline_seconds=DEADLINE_SECONDS)

    async def wake(self, request_id: str, *tags: int) -> tenant_pb2.WakeResponse:
        request = tenant_pb2.WakeRequest(request_id=request_id, tags=tags, token=TOKEN, deadline_seconds=5.0)
        return await self.peer.call(self.tenant.Wake, request, deadline_seconds=DEADLINE_SECONDS)


class RecordingGuard:
    """What is checked and said; refuses while `stale`."""

    shares_gpus = True

    def __init__(self) -> None:
        self.token = grant_pb2.GrantToken()
        self.stale = False
        self.checked: list[tuple[int, list[int]]] = []
        self.said: list[tuple[str, list[int]]] = []

    async def check(self, token: grant_pb2.GrantToken, tags: Any = ()) -> None:
        self.checked.append((token.sequence, sorted(tags)))
        if self.stale:
            raise Conflict(f"token {token.sequence} does not hold")
        self.token.CopyFrom(token)

    @asynccontextmanager
    async def moving(self, token: grant_pb2.GrantToken, tags: Any = ()) -> AsyncIterator[None]:
        await self.check(token, tags)
        yield

    async def slept(self, response: tenant_pb2.SleepResponse, tags: Any) -> None:
        self.said.append(("slept", sorted(tags)))

    async def woke(self, response: tenant_pb2.WakeResponse, tags: Any) -> None:
        self.said.append(("woke", sorted(tags)))


def step_requests(header: Any, batch: list[Any]) -> Any:
    requests = [learner_pb2.TrainStepRequest(header=header)]
    return iter(requests + [learner_pb2.TrainStepRequest(trajectory=row) for row in batch])


def forward_header(temperature: float = 1.0) -> learner_pb2.ForwardRequest:
    return learner_pb2.ForwardRequest(header=learner_pb2.ForwardHeader(temperature=temperature))


def sequence(name: str, *token_ids: int) -> learner_pb2.ForwardRequest:
    return learner_pb2.ForwardRequest(sequence=learner_pb2.Sequence(id=name, token_ids=token_ids))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    ranks = RanksTwin(count=2)
    guard = RecordingGuard()
    learner = Learner(ranks, guard)

    async def health_check() -> str | None:
        return ranks.problem

    server = Server("127.0.0.1", 0, health_check)
    for register, servicer, module, name in (
        (
            learner_pb2_grpc.add_LearnerServiceServicer_to_server,
            LearnerServicer(learner, guard),
            learner_pb2,
            "LearnerService",
        ),
        (
            tenant_pb2_grpc.add_TenantServiceServicer_to_server,
            TenantServicer(learner, guard),
            tenant_pb2,
            "TenantService",
        ),
    ):
        server.add(register, servicer, module.DESCRIPTOR.services_by_name[name].full_name)
    await server.start()
    serving = asyncio.create_task(server.serve_until_stopped(grace_seconds=0.1))
    peer = Peer("learner", server.address)
    yield Client(ranks, guard, peer)
    await peer.close()
    server.request_stop()
    await serving


async def until(condition) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), DEADLINE_SECONDS)


# Forward


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


# TrainStep


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


# Encode


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


# JoinTransfer and Publish


async def test_publication_of_the_current_version(client):
    batch = make_batch(50)
    manifest = await client.join(1)
    assert manifest.epoch == 1 and manifest.sender_ranks == 2
    result = await client.publish(1, 0, "first")
    assert (result.policy.version, result.policy.digest) == (0, DIGEST_OF_VERSION_0)
    assert list(result.probe_token_ids) == [1, 2] and list(result.probe_logprobs) == [-0.5]
    assert (await client.state()).policy.digest == DIGEST_OF_VERSION_0

    await client.step(make_header(1, batch), batch)
    assert (await client.state()).policy.digest == 0  # not known before its publication
    with pytest.raises(Conflict, match="publish version 0: the policy is at 1"):
        await client.publish(1, 0, "old")
    second = await client.publish(1, 1, "second")  # the same epoch serves again
    assert (second.policy.version, second.policy.digest) == (1, DIGEST_OF_VERSION_0 + 1)
    assert await client.publish(1, 1, "second") == second
    assert client.ranks.asked.count("publish") == 2
    assert (await client.publish(1, 1, "to a newcomer")).policy == second.policy
    with pytest.raises(Conflict, match="publication second: asked before with other content"):
        await client.publish(1, 2, "second")


async def test_join_answers_before_anybody_came_and_publish_waits_for_them(client):
    client.ranks.hold.add("connect_transfer")
    manifest = await client.join(3)
    assert manifest.epoch == 3
    assert await client.forward(forward_header(), sequence("a", 1))  # other work goes on
    publication = asyncio.create_task(client.publish(3, 0, "p"))
    await until(lambda: "connect_transfer" in client.ranks.asked)
    client.ranks.release()
    assert (await publication).policy.version == 0
    assert client.ranks.connected[0].manifest == manifest
    assert 0 < client.ranks.connected[0].deadline_seconds <= 5


async def test_who_does_not_come_is_told_by_publish(client):
    client.ranks.errors["connect_transfer"] = Unavailable("transfer group 1/0: not everybody came within 5 s")
    await client.join(1)
    with pytest.raises(Unavailable, match=r"epoch 1 cannot be used any more, make a new one: .*not everybody came"):
        await client.publish(1, 0, "p")
    client.ranks.hold.add("connect_transfer")
    await client.join(2)
    with pytest.raises(Expired, match="epoch 2: not every receiver came within 0 s"):
        await client.publish(2, 0, "q", deadline=0.2)


async def test_epochs_only_rise(client):
    first = await client.join(5)
    assert await client.join(5) == first
    assert client.ranks.asked.count("join_transfer") == 1
    with pytest.raises(Conflict, match="epoch 4 is over: this learner is in epoch 5"):
        await client.join(4)
    with pytest.raises(Conflict, match="epoch 5: joined before with other settings"):
        await client.join(5, receiver_ranks=3)
    with pytest.raises(Conflict, match="epoch 6: this learner is in epoch 5"):
        await client.publish(6, 0, "p")
    await client.join(6)
    with pytest.raises(Conflict, match="epoch 5: this learner is in epoch 6"):
        await client.publish(5, 0, "q")


async def test_a_newer_epoch_ends_the_wait_of_an_older_one(client):
    client.ranks.hold.add("connect_transfer")
    await client.join(1)
    waiting = asyncio.create_task(client.publish(1, 0, "p"))
    await until(lambda: "connect_transfer" in client.ranks.asked)
    client.ranks.hold.clear()
    await client.join(2)
    with pytest.raises(Conflict, match="epoch 1: this learner is in epoch 2"):
        await waiting
    assert (await client.publish(2, 0, "q")).policy.version == 0


async def test_a_publication_that_broke_breaks_its_epoch(client):
    await client.join(1)
    client.ranks.errors["publish"] = Expired("bucket 3 of 7 was not through at the deadline")
    with pytest.raises(Expired, match="bucket 3 of 7"):
        await client.publish(1, 0, "p")
    with pytest.raises(Unavailable, match="make a new one: bucket 3 of 7"):
        await client.publish(1, 0, "p")
    await client.join(2)
    assert (await client.publish(2, 0, "p")).policy.digest == DIGEST_OF_VERSION_0


@pytest.mark.parametrize(
    "settings",
    [{"receiver_ranks": 0}, {"bucket_bytes": 0}, {"deadline_seconds": 0.0}, {"transport": 0}, {"transport": 77}],
)
async def test_join_refuses(client, settings):
    with pytest.raises(InvalidRequest):
        await client.join(1, **settings)
    assert client.ranks.asked == []


# Export


async def test_export_is_remembered_by_its_request(client):
    batch = make_batch(50)
    await client.step(make_header(1, batch), batch)
    result = await client.export("/models/one", "e")
    assert (result.path, result.policy.version) == ("/models/one", 1)
    assert await client.export("/models/one", "e") == result
    assert client.ranks.asked.count("export") == 1
    with pytest.raises(Conflict, match="export e: asked before with other content"):
        await client.export("/models/two", "e")
    with pytest.raises(InvalidRequest, match="expected an absolute path"):
        await client.export("models/one", "f")
    with pytest.raises(InvalidRequest, match="request_id is empty"):
        await client.export("/models/one", "")
    client.ranks.errors["export"] = InvalidRequest("export to /models/one: it exists")
    with pytest.raises(InvalidRequest, match="it exists"):
        await client.export("/models/one", "g")


# TenantService


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


# Sleep and Wake


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


# Hostile requests


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), 1e300])
async def test_a_deadline_that_no_clock_holds_never_reaches_the_ranks(client, deadline):
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        await client.join(1, deadline_seconds=deadline)
    await client.join(1)
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        await client.publish(1, 0, "p", deadline=deadline)
    assert "publish" not in client.ranks.asked


async def test_too_many_receivers_and_a_path_no_system_takes_never_reach_the_ranks(client):
    with pytest.raises(InvalidRequest, match="receiver_ranks"):
        await client.join(1, receiver_ranks=2**31 - 1)
    with pytest.raises(InvalidRequest, match="absolute path"):
        await client.export("/tmp/a\0b", "e")
    assert client.ranks.asked == []


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
