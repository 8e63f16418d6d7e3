"""Waiting: named deadlines, few tries, a stop that interrupts and a stop that waits; and the event log's heartbeat."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.types.v1 import policy_pb2

from services.common.errors import Conflict, Expired, Overloaded, Unavailable
from services.coordinator import events as events_module
from services.coordinator.events import EventLog
from services.coordinator.waits import Stopped, StopSignal, cancelled, few_tries, within


async def test_a_deadline_names_what_was_waited_for() -> None:
    with pytest.raises(Expired, match="the kettle: not done after 0 s"):
        async with within(0.01, "the kettle"):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):  # one of the inside is not ours
        async with within(10.0, "the kettle"):
            raise TimeoutError
    async with within(10.0, "the kettle"):
        pass


class Attempts:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


async def test_few_tries() -> None:
    attempts = Attempts(Unavailable("a"), Overloaded("b", 0.01))
    assert await few_tries(attempts) == "done"
    assert attempts.calls == 3
    started = time.monotonic()
    attempts = Attempts(*(Unavailable(str(n)) for n in range(10)))
    with pytest.raises(Unavailable, match="3"):
        await few_tries(attempts)
    assert attempts.calls == 4
    assert time.monotonic() - started < 3.0
    attempts = Attempts(Conflict("no"))
    with pytest.raises(Conflict):
        await few_tries(attempts)
    assert attempts.calls == 1


class Work:
    """Something that lasts, and notes how it ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = "not begun"

    async def run(self) -> str:
        self.end = "running"
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.end = "cancelled"
            raise
        self.end = "done"
        return "result"


async def stop_soon(stop: StopSignal) -> None:
    await asyncio.sleep(0.02)
    stop.request("enough")


async def test_a_stop_interrupts_at_once() -> None:
    stop, work = StopSignal(), Work(60.0)
    stopping = asyncio.create_task(stop_soon(stop))
    with pytest.raises(Stopped, match="enough"):
        await stop.interrupting(work.run())
    assert work.end == "cancelled"
    await stopping
    later = Work(0.0)
    with pytest.raises(Stopped):
        await stop.interrupting(later.run())
    assert later.end == "not begun"
    stop.request("again")
    assert stop.reason == "enough"


async def test_a_stop_waits_for_what_must_end_but_not_for_ever() -> None:
    stop, work = StopSignal(), Work(0.1)
    stopping = asyncio.create_task(stop_soon(stop))
    assert await stop.after(work.run(), 10.0) == "result"
    await stopping
    stop, work = StopSignal(), Work(60.0)
    stopping = asyncio.create_task(stop_soon(stop))
    with pytest.raises(Stopped):
        await stop.after(work.run(), 0.1)
    assert work.end == "cancelled"
    await stopping


async def test_errors_pass_and_a_failure_beside_is_raised() -> None:
    stop = StopSignal()

    async def fail() -> None:
        raise Conflict("mine")

    with pytest.raises(Conflict, match="mine"):
        await stop.interrupting(fail())
    work = Work(60.0)
    asyncio.get_running_loop().call_later(0.02, stop.fail, RuntimeError("the registry broke"))
    with pytest.raises(RuntimeError, match="registry"):
        await stop.interrupting(work.run())
    assert work.end == "cancelled"


async def test_a_cancel_that_gets_lost_is_repeated() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await cancelled(task)
    assert (task.cancelled(), lost) == (True, 2)


# The event log


async def collect(log: EventLog, from_sequence: int = 0) -> list[events_pb2.RunEvent]:
    return [event async for event in log.follow(from_sequence)]


def end(log: EventLog) -> None:
    log.end("finished", "", "", policy_pb2.Policy(version=3))


async def test_followers_hear_everything_once_and_end_with_the_run() -> None:
    log = EventLog()
    log.enter(events_pb2.RUN_PHASE_START, 0, "workers, 5 s at most")
    early, late = asyncio.create_task(collect(log)), asyncio.create_task(collect(log, 2))
    await asyncio.sleep(0)
    log.notice("info", "hello")
    log.step_finished(1, 3, {"reward": 0.5})
    end(log)
    everything = await early
    assert [event.sequence for event in everything] == [0, 1, 2, 3]
    assert [event.WhichOneof("event") for event in everything] == [
        "phase_changed",
        "notice",
        "step_finished",
        "run_ended",
    ]
    assert await late == everything[2:]
    assert await collect(log) == everything
    assert everything[2].step_finished.metrics[0] == events_pb2.Metric(name="reward", value=0.5)
    assert log.phase == events_pb2.RUN_PHASE_ENDED


async def test_the_end_is_told_only_when_somebody_heard_it() -> None:
    log = EventLog()
    end(log)
    assert not await log.wait_until_told(0.05)
    watcher = asyncio.create_task(collect(log))
    assert await log.wait_until_told(5.0)
    await watcher


async def test_a_follower_that_leaves_does_not_keep_the_end_waiting() -> None:
    log = EventLog()
    log.notice("info", "a")
    leaving = log.follow(0)
    await anext(leaving)
    end(log)
    watcher = asyncio.create_task(collect(log))
    assert await log.wait_until_told(0.05)  # told to one, although the other is in the middle: bounded
    await leaving.aclose()
    await watcher


async def test_progress_is_thinned_and_the_last_of_a_phase_always_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    log.enter(events_pb2.RUN_PHASE_GENERATE, 4, "64 trajectories")
    for done in range(65):
        log.progress(done, 64)
    end(log)
    told = [event.phase_progress for event in await collect(log) if event.WhichOneof("event") == "phase_progress"]
    assert (told[-1].done, told[-1].of, told[-1].step, told[-1].detail) == (64, 64, 4, "64 trajectories")
    assert len(told) <= 2


async def test_a_phase_in_which_nothing_advances_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert events_module.HEARTBEAT_SECONDS < 5.0  # what the contract promises
    monkeypatch.setattr(events_module, "HEARTBEAT_SECONDS", 0.08)
    log = EventLog()
    beating = asyncio.create_task(log.run_heartbeat())
    log.enter(events_pb2.RUN_PHASE_TRAIN, 2, "step 2 at learner-0")
    log.progress(3, 8, "forward")
    heard: list[Any] = []
    async with asyncio.timeout(10.0):
        async for event in log.follow(0):
            if event.WhichOneof("event") == "phase_progress":
                heard.append(event.phase_progress)
            if len(heard) == 3:
                break
    assert {(p.phase, p.step, p.done, p.of, p.detail) for p in heard} == {
        (events_pb2.RUN_PHASE_TRAIN, 2, 3, 8, "forward")
    }
    end(log)
    async with asyncio.timeout(10.0):
        await beating  # it ends with the run
