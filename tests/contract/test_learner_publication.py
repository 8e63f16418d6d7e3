"""JoinTransfer, Publish and Export of a learner over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Conflict, Expired, InvalidRequest, Unavailable
from tests.contract.learner_client import (
    Client,
    forward_header,
    sequence,
    served_learner,
    until,
)
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.ranks_twin import DIGEST_OF_VERSION_0


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served_learner() as served:
        yield served


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
