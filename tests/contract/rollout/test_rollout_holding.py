"""Finished trajectories are held until they are acknowledged: delivered again, bounded, and never sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import trajectory_pb2
from antiphon.types.v1.trajectory_pb2 import Trajectory

from services.common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from services.rollout import generations
from services.rollout.holding import BYTES_BESIDE, BYTES_PER_TOKEN
from tests.contract.rollout.rollout_client import Client, make_client
from tests.contract.rollout.rollout_requests import ask
from tests.unit.rollout.memory_engine import MemoryEngine


async def acknowledge(client: Client, request_id: str, numbers: Sequence[int] = ()) -> int:
    call = rollout_pb2.AcknowledgedCall(request_id=request_id, sample_numbers=numbers)
    answer = await client.call("Acknowledge", rollout_pb2.AcknowledgeRequest(calls=[call]))
    return int(answer.forgotten)


def held(client: Client) -> tuple[int, int]:
    holding = client.rollout.generations._holding
    return holding.trajectories, holding.bytes


async def interrupted(client: Client, finished: Sequence[int]) -> dict[int, Trajectory]:
    """A call for samples 0, 1, 2 whose caller goes away when only these are finished; what it had got by then."""
    client.engine.pause()
    got: dict[int, Trajectory] = {}

    async def listen() -> None:
        async for answer in client.stream(ask()):
            got[answer.trajectory.sample_number] = answer.trajectory

    call = asyncio.create_task(listen())
    await client.engine.until_running(3)
    for number in finished:
        client.engine.finish(f"r/{number}#")
    await client.until(lambda: sorted(got) == sorted(finished))
    call.cancel()
    await client.until(lambda: client.rollout._gate.outstanding == 0)
    client.engine.resume()
    return got


async def test_a_call_that_broke_off_keeps_what_was_finished(ready: Client) -> None:
    first = await interrupted(ready, [2, 0])
    asked = len(ready.engine.requests)
    again = await ready.generate(ask())
    assert [t.sample_number for t in again] == [2, 0, 1]  # what is held comes at once, in the order of finishing
    assert again[:2] == [first[2], first[0]]
    assert [request.id for request in ready.engine.requests[asked:]] == ["r/1#1"]  # only what was missing


async def test_what_is_held_is_delivered_whatever_becomes_of_the_rest(ready: Client) -> None:
    """A coordinator that comes back finds engines that are not serving; what it paid for is there."""
    await interrupted(ready, [1])
    await ready.begin(1, 1)
    ready.engine.break_transfer(Unavailable("gone"))
    await ready.until(lambda: ready.rollout.life.state == tenant_pb2.WORKER_STATE_STALE)
    got = []
    with pytest.raises(Unavailable, match="STALE"):
        async for answer in ready.stream(ask()):
            got.append(answer.trajectory.sample_number)
    assert got == [1]
    assert held(ready)[0] == 1


async def test_the_rest_is_sampled_with_the_same_seeds(ready: Client) -> None:
    whole = {t.sample_number: t for t in await ready.generate(ask("whole"))}
    await interrupted(ready, [0])
    again = {t.sample_number: t for t in await ready.generate(ask())}
    assert again == whole


async def test_a_late_answer_of_a_call_that_broke_off_is_dropped(ready: Client) -> None:
    """The engine has an id for each attempt, so an answer to the first is never taken for one to the second."""
    await interrupted(ready, [])
    assert set(ready.engine.cancelled) == {"r/0#0", "r/1#0", "r/2#0"}
    assert len(await ready.generate(ask())) == 3
    assert [request.id for request in ready.engine.requests[3:]] == ["r/0#1", "r/1#1", "r/2#1"]


async def test_acknowledged_trajectories_are_forgotten(ready: Client) -> None:
    await ready.generate(ask())
    count, size = held(ready)
    assert (count, size) == (3, 3 * (6 * BYTES_PER_TOKEN + BYTES_BESIDE))
    assert await acknowledge(ready, "r", [1]) == 1
    assert await acknowledge(ready, "r", [1]) == 0
    assert held(ready)[0] == 2
    assert [t.sample_number for t in await ready.generate(ask())] == [0, 2]
    assert len(ready.engine.requests) == 3
    assert await acknowledge(ready, "r") == 2
    assert held(ready) == (0, 0) and ready.rollout.generations._known == {}
    with pytest.raises(Conflict, match=r"Generate r: every trajectory of it was acknowledged"):
        await ready.generate(ask())
    assert len(ready.engine.requests) == 3
    assert await acknowledge(ready, "unknown") == 0


async def test_acknowledging_what_is_not_finished_does_nothing(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    ready.engine.finish("r/1#")
    await ready.until(lambda: held_numbers(ready) == [1])
    assert await acknowledge(ready, "r", [0, 1, 2, 99]) == 1
    ready.engine.resume()
    assert sorted(t.sample_number for t in await call)[-2:] in ([1, 2], [0, 2])
    assert held_numbers(ready) == [0, 2]


def held_numbers(client: Client) -> list[int]:
    known = client.rollout.generations._known.get("r")
    return [] if known is None else sorted(known.held)


async def test_only_so_many_acknowledged_ids_are_remembered(ready: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "KEEP_ACKNOWLEDGED", 2)
    for name in ("a", "b", "c"):
        await ready.generate(ask(name))
        await acknowledge(ready, name)
    with pytest.raises(Conflict, match="acknowledged"):
        await ready.generate(ask("b"))
    assert len(await ready.generate(ask("a"))) == 3


async def test_an_aborted_call_is_held_as_it_ended(ready: Client) -> None:
    ready.engine.pause()
    call = ready.asked(ask())
    await ready.engine.until_running(3)
    await ready.call("Abort", rollout_pb2.AbortRequest(request_ids=["r"]))
    first = await call
    ready.engine.resume()
    assert await ready.generate(ask()) == first
    assert {t.finish_reason for t in first} == {trajectory_pb2.FINISH_REASON_ABORTED}


async def test_held_bytes_push_back(tmp_path: Path) -> None:
    """A call counts as if it were sampled to its limit, so what was begun always has room for its end."""
    async with make_client(MemoryEngine(), tmp_path) as client:
        await client.publish(1, 0)
        most = 6 * BYTES_PER_TOKEN + BYTES_BESIDE
        client.rollout.generations._holding.most_bytes = 7 * most
        client.engine.pause()
        running = client.asked(ask("running"))
        await client.engine.until_running(3)
        assert held(client) == (3, 3 * most)
        client.engine.resume()
        await running
        await client.generate(ask("second"))
        with pytest.raises(Overloaded, match="acknowledge what is durable") as caught:
            await client.generate(ask("third"))
        assert caught.value.retry_after_seconds == 1.0
        assert len(await client.generate(ask("third", samples=1))) == 1
        assert await client.generate(ask("second")) != []  # a repeat needs no room
        await acknowledge(client, "running")
        assert len(await client.generate(ask("fourth"))) == 3
        with pytest.raises(InvalidRequest, match=r"hold_mib.*ask for fewer"):
            await client.generate(ask("never", samples=8))
        assert client.rollout._gate.outstanding == 0


async def test_the_number_of_held_trajectories_pushes_back(tmp_path: Path) -> None:
    async with make_client(MemoryEngine(), tmp_path, hold_trajectories=4) as client:
        await client.publish(1, 0)
        await client.generate(ask("first"))
        with pytest.raises(Overloaded):
            await client.generate(ask("second"))
        await acknowledge(client, "first", [0, 1])
        assert len(await client.generate(ask("second"))) == 3


async def test_more_than_the_queue_ever_takes_is_refused_for_good(ready: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"21 trajectories in one call; .* 20 .*max_outstanding"):
        await ready.generate(ask(samples=21))


async def test_what_nobody_asks_for_is_forgotten_in_time(ready: Client, caplog: pytest.LogCaptureFixture) -> None:
    await ready.generate(ask("old"))
    ready.engine.pause()
    running = ready.asked(ask("running", samples=1))
    await ready.engine.until_running(1)
    ready.rollout.generations._hold_seconds = 0.0
    ready.engine.resume()
    await running
    assert len(await ready.generate(ask("new", samples=1))) == 1
    assert set(ready.rollout.generations._known) == {"new"}
    assert "Generate old: 3 finished trajectories were not acknowledged within 0 s and are forgotten" in caplog.text
    assert held(ready)[0] == 1


async def test_an_id_that_came_to_nothing_is_free(ready: Client) -> None:
    with pytest.raises(Conflict, match="version 5"):
        await ready.generate(ask(policy_version=5))
    assert ready.rollout.generations._known == {} and held(ready) == (0, 0)
    assert len(await ready.generate(ask())) == 3


async def test_a_repeat_that_comes_while_the_first_is_being_cancelled_samples_anew(ready: Client) -> None:
    ready.engine.pause()
    first = ready.asked(ask())
    await ready.engine.until_running(3)
    first.cancel()
    second = ready.asked(ask())
    await ready.until(lambda: len(ready.engine.requests) in (3, 6))
    ready.engine.resume()
    assert len(await second) == 3
    assert held(ready)[0] == 3
