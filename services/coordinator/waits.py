"""Waiting with a name, a deadline and an end: no wait of the run is without (docs/design.md §1, law 4)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from services.common.errors import AntiphonError, Expired, Overloaded, Unavailable

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

# A dead process refuses connections at once: the tries below are over within about two seconds.
TRIES = 4
FIRST_PAUSE_SECONDS = 0.2
CANCEL_TRIES = 5


class Stopped(Exception):
    """Somebody asked the run to stop; what was being waited for was given up. Not an error."""


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Bounds what is awaited inside. Raises Expired naming it."""
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise Expired(f"{what}: not done after {seconds:.0f} s") from None


async def few_tries(attempt: Callable[[], Awaitable[Answer]], tries: int = TRIES) -> Answer:
    """Repeats `attempt` while it says Unavailable or Overloaded, a few times in seconds, then raises the last error, or
    where that only says that nobody answered, the last that a worker gave: it says why.

    For calls whose own deadline is long: a worker that died must be noticed now, not at that deadline.
    """
    pause = FIRST_PAUSE_SECONDS
    told: AntiphonError | None = None
    for left in reversed(range(tries)):
        try:
            return await attempt()
        except (Unavailable, Overloaded) as error:
            told = error if error.answered else told or error
            if left == 0:
                raise told from None
            wait = max(pause * random.uniform(0.5, 1.0), getattr(error, "retry_after_seconds", 0.0))
        await asyncio.sleep(wait)
        pause *= 2
    raise AssertionError("tries must be at least 1")


class StopSignal:
    """The wish to end the run, and the two ways of waiting under it."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._error: Exception | None = None
        self._requested_at = 0.0
        self.reason = ""

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def request(self, reason: str) -> None:
        """Idempotent: the first reason stays."""
        if not self.requested:
            self.reason = reason
            self._requested_at = time.monotonic()
            self._requested.set()

    def seconds_left(self, bound_seconds: float) -> float:
        """Of so many since the wish came; endless while there is none."""
        return bound_seconds - (time.monotonic() - self._requested_at) if self._requested_at else math.inf

    def fail(self, error: Exception) -> None:
        """Ends the run because something beside the loop failed: waits raise the error instead of Stopped."""
        self._error = self._error or error
        self._requested.set()

    async def interrupting(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of the work, which is cancelled at once when the run is to stop (raises Stopped)."""
        return await self._race(work, grace_seconds=0.0)

    async def after(self, work: Coroutine[Any, Any, Answer], grace_seconds: float) -> Answer:
        """The result of work that may end first: a stop waits for it, so long at most, then gives it up (Stopped)."""
        return await self._race(work, grace_seconds)

    async def _race(self, work: Coroutine[Any, Any, Answer], grace_seconds: float) -> Answer:
        if self.requested:
            work.close()
            raise self._error or Stopped(self.reason)
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and grace_seconds > 0.0:
                await asyncio.wait({task}, timeout=grace_seconds)
            if task.done():
                return task.result()
            raise self._error or Stopped(self.reason)
        finally:
            stop.cancel()
            await cancelled(task)


async def together(calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Every answer, in order. At the first error the other calls are given up, and it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and task.exception() is not None:
                task.result()
        return [task.result() for task in tasks]
    finally:
        await cancelled(*tasks)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits until each has ended; what they raise is not of interest any more.

    A cancel can get lost (asyncio.wait_for in Python 3.11 drops one that comes as its future is done): it is repeated.
    """
    pending = {task for task in tasks if not task.done()}
    for _ in range(CANCEL_TRIES):
        if not pending:
            break
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1.0)
    for task in pending:
        logger.error("%r does not end when cancelled; left behind", task)
    await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)
