"""RolloutService over a real channel with an engine in memory: taking policies."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1.trajectory_pb2 import PromptId

from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.rollout import updates
from services.rollout.engine import EngineDead, Unmatched
from services.rollout.seeds import sample_seed
from services.rollout.states import FAILED, READY, STALE, UPDATING
from tests.contract.rollout.rollout_client import Client, make_client
from tests.contract.rollout.rollout_requests import ask, commit_request
from tests.unit.rollout.memory_engine import MemoryEngine

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


@pytest.mark.parametrize("joined", [-1, 0, 5, 2**50])
async def test_an_epoch_that_nobody_could_follow_is_refused(stale: Client, joined: int) -> None:
    """One wrong number must not shut an engine out for good; a coordinator that starts anew may skip many."""
    stale.rollout.updates._group.epoch = joined
    at = max(joined, 0)
    for epoch in (2**63 - 1, at + 2**44 + 1):
        with pytest.raises(Conflict, match=rf"epoch {epoch} is more than .* join epoch {at + 1}"):
            await stale.join(epoch)
    assert stale.engine.joined == [] and stale.rollout.updates._group.epoch == joined
    await stale.publish(at + 1_790_000_000_000, 0)  # a time in milliseconds
    await stale.publish(at + 1_790_000_000_001, 1)
    assert stale.engine.version == 1


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


async def test_a_torn_model_is_a_dead_engine(ready: Client) -> None:
    await ready.begin(1, 1)
    ready.engine.deliver()
    ready.engine.load_error = EngineDead("the model is torn")
    with pytest.raises(Unavailable, match="torn"):
        await ready.commit(1)
    assert (await ready.state()).state == FAILED


@pytest.mark.parametrize("deadline", [math.nan, math.inf, 1e300, -1.0])
async def test_begin_update_refuses_a_deadline_that_no_clock_holds(stale: Client, deadline: float) -> None:
    await stale.join(1)
    with pytest.raises(InvalidRequest, match="deadline_seconds"):
        await stale.begin(1, 0, deadline=deadline)


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
