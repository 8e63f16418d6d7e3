from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from services.common.operations import MOST_RUNNING, Operation, Operations, Report


class Work:
    """Counts how often it was begun; ends when released."""

    def __init__(self, result: str = "done", error: Exception | None = None) -> None:
        self.begun = 0
        self.finished = 0
        self.release = asyncio.Event()
        self.report: Report | None = None
        self._result = result
        self._error = error

    async def __call__(self, report: Report) -> str:
        self.begun += 1
        self.report = report
        await self.release.wait()
        if self._error is not None:
            raise self._error
        self.finished += 1
        return self._result


async def collected(operation: Operation[str]) -> list[Any]:
    return [message async for message in operation.follow()]


async def test_a_repeat_attaches_and_gets_the_first_answer() -> None:
    operations: Operations[str] = Operations("step")
    work, other = Work("first"), Work("second")
    first = operations.start_or_attach("7", b"x", work)
    again = operations.start_or_attach("7", b"x", other)
    assert again is first and operations.running() == [first]
    work.release.set()
    assert await first.result() == "first"
    late = operations.start_or_attach("7", b"x", other)
    assert await late.result() == "first"
    assert (await collected(late))[-1] == "first"
    assert (work.begun, other.begun) == (1, 0)
    assert operations.running() == []


async def test_the_same_key_with_other_content_is_a_conflict_running_or_done() -> None:
    operations: Operations[str] = Operations("step")
    work = Work()
    operation = operations.start_or_attach("7", b"x", work)
    with pytest.raises(Conflict, match="step 7"):
        operations.start_or_attach("7", b"y", Work())
    work.release.set()
    await operation.result()
    with pytest.raises(Conflict):
        operations.start_or_attach("7", b"y", Work())
    assert operations.start_or_attach("8", b"y", Work()) is not operation


async def test_a_failed_one_can_be_tried_again_with_other_content() -> None:
    operations: Operations[str] = Operations("step")
    broken = Work(error=LookupError("no rank"))
    broken.release.set()
    failed = operations.start_or_attach("7", b"x", broken)
    with pytest.raises(LookupError, match="no rank"):
        await failed.result()
    with pytest.raises(LookupError, match="no rank"):
        await collected(failed)
    assert failed.failed
    work = Work("better")
    work.release.set()
    assert await operations.start_or_attach("7", b"y", work).result() == "better"


async def test_cancelled_waiters_and_followers_leave_the_work_alone() -> None:
    operations: Operations[str] = Operations("step")
    work = Work()
    operation = operations.start_or_attach("7", b"x", work)
    waiter = asyncio.create_task(operation.result())
    follower = asyncio.create_task(collected(operation))
    await asyncio.sleep(0.01)
    for task in (waiter, follower):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not operation.done
    work.release.set()
    assert await operation.result() == "done" and work.finished == 1


async def test_the_work_goes_on_when_nobody_holds_the_operation() -> None:
    operations: Operations[str] = Operations("step")
    work = Work()
    operations.start_or_attach("7", b"x", work)
    await asyncio.sleep(0)
    gc.collect()
    work.release.set()
    await asyncio.sleep(0.01)
    assert work.finished == 1


async def test_followers_see_each_advance_then_the_result() -> None:
    work = Work()
    operation = Operation("step 7", b"", work)
    seen = operation.follow()
    first = await anext(seen)
    assert first.phase == "queued"
    assert work.report is None  # not begun: the task runs at the next await
    waiting = asyncio.ensure_future(anext(seen))
    await asyncio.sleep(0)
    assert work.report is not None
    work.report("forward", 1, 4)
    progress = await asyncio.wait_for(waiting, 1)
    assert (progress.phase, progress.done, progress.of) == ("forward", 1, 4)
    work.report("forward", 2, 4)  # between two looks: must not be lost
    progress = await asyncio.wait_for(anext(seen), 1)
    assert progress.done == 2
    work.release.set()
    assert await asyncio.wait_for(anext(seen), 1) == "done"
    with pytest.raises(StopAsyncIteration):
        await anext(seen)


async def test_silence_is_filled_by_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.common import operations as module

    assert module.HEARTBEAT_SECONDS < 5, "the contract promises a message every 5 s"
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    work = Work()
    operation = Operation("step 7", b"", work)
    before = len(asyncio.all_tasks())
    began = time.monotonic()
    beats = 0
    last: object = None
    async for message in operation.follow():
        last = message
        beats += 1
        if beats == 10:
            assert len(asyncio.all_tasks()) <= before + 1, "a heartbeat leaves a task behind"
            work.release.set()
    assert last == "done" and beats >= 10
    assert 0.4 < time.monotonic() - began < 3


async def test_finished_ones_are_forgotten_by_count_oldest_first() -> None:
    operations: Operations[str] = Operations("step", keep=3)

    async def named(key: str) -> str:
        async def work(report: Report) -> str:
            return key

        return await operations.start_or_attach(key, b"", work).result()

    running = operations.start_or_attach("running", b"", Work())
    for key in "abcde":
        await named(key)
    assert list(operations._known) == ["running", "d", "e"]  # one that runs is never forgotten
    assert operations.start_or_attach("running", b"", Work()) is running
    with pytest.raises(Conflict):
        operations.start_or_attach("d", b"other", Work())


async def test_finished_ones_are_forgotten_by_age_counted_from_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("services.common.operations.time.monotonic", lambda: now)
    operations: Operations[str] = Operations("step", keep_seconds=60)
    work = Work()
    operation = operations.start_or_attach("7", b"x", work)
    now += 100  # longer than it is kept: only the end counts
    work.release.set()
    await operation.result()
    assert operations.start_or_attach("7", b"x", Work()) is operation
    now += 59
    assert operations.start_or_attach("7", b"x", Work()) is operation
    now += 2
    assert operations.start_or_attach("7", b"x", Work()) is not operation


async def test_stopped_work_tells_those_attached() -> None:
    operations: Operations[str] = Operations("publish")
    operation = operations.start_or_attach("7", b"x", Work())
    waiter = asyncio.create_task(operation.result())
    follower = asyncio.create_task(collected(operation))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(operations.stop(), 1)
    for task in (waiter, follower):
        with pytest.raises(Unavailable, match="publish 7"):
            await task
    assert operations.running() == []


async def test_a_bug_is_logged_with_its_traceback_even_if_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(error=ZeroDivisionError("in the middle"))
    work.release.set()
    operation = Operation("step 7", b"", work)
    await asyncio.sleep(0.01)
    assert operation.failed
    assert "step 7 failed" in caplog.text and "Traceback" in caplog.text


async def test_a_follower_may_be_slow() -> None:
    async def work(report: Report) -> str:
        for number in range(100):
            report("update", number, 100)
        return "done"

    operation = Operation("step 7", b"", work)

    async def slow() -> AsyncIterator[Any]:
        async for message in operation.follow():
            yield message
            await asyncio.sleep(0.01)

    messages = [message async for message in slow()]
    assert messages[-1] == "done" and len(messages) <= 3


async def test_ids_and_the_operations_under_way_are_bounded() -> None:
    operations: Operations[int] = Operations("thing")

    async def forever(_: object) -> int:
        await asyncio.Event().wait()
        return 0

    with pytest.raises(InvalidRequest, match="1001 characters"):
        operations.start_or_attach("x" * 1001, b"", forever)
    for number in range(MOST_RUNNING):
        operations.start_or_attach(str(number), b"", forever)
    with pytest.raises(Overloaded, match="others run"):
        operations.start_or_attach("one more", b"", forever)
    operations.start_or_attach("0", b"", forever)  # a repeat attaches
    await operations.stop()
