"""Work that outlives the call that asked for it: it runs in a task of its own, a repeat of the call attaches to it.

A cancelled call cancels its handler at the next await, so a handler must not do the work itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from antiphon.types.v1 import progress_pb2

from services.common.errors import AntiphonError, Conflict, InvalidRequest, Overloaded, Unavailable

Result = TypeVar("Result")
Report = Callable[[str, int, int], None]
"""report(phase, done, of): says how far the work is."""

HEARTBEAT_SECONDS = 4.0  # the contract promises a message at least every 5 s
LONGEST_KEY = 1000  # characters; keys are remembered
MOST_RUNNING = 64  # of one kind: what runs or waits for its turn is kept whatever becomes of its callers
logger = logging.getLogger(__name__)


class Operation(Generic[Result]):
    """One piece of work under way or done."""

    def __init__(self, key: str, fingerprint: bytes, work: Callable[[Report], Awaitable[Result]]) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.ended_at = 0.0  # monotonic; 0 while it runs
        self._progress = progress_pb2.Progress(phase="queued")
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(work(self._report))
        self._task.add_done_callback(self._ended)

    def _report(self, phase: str, done: int, of: int) -> None:
        self._progress = progress_pb2.Progress(phase=phase, done=done, of=of)
        self._wake()

    def _ended(self, task: asyncio.Future[Result]) -> None:
        self.ended_at = time.monotonic()
        if not task.cancelled() and (error := task.exception()) is not None:  # seen here: asyncio need not complain
            # With nobody attached this line is all there is; a bug needs its traceback.
            bug = None if isinstance(error, AntiphonError) else error
            logger.warning("%s failed: %s: %s", self.key, type(error).__name__, error, exc_info=bug)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    async def result(self) -> Result:
        """Waits for the end and raises what the work raised; a waiter that is cancelled leaves the work alone."""
        await asyncio.wait({self._task})
        return self._outcome()

    async def follow(self) -> AsyncIterator[progress_pb2.Progress | Result]:
        """Progress at each advance and at least every few seconds, then the result; raises what the work raised.

        A follower that is slow gets the latest progress, not each. One that is cancelled leaves the work alone.
        """
        while not self._task.done():
            changed = self._changed
            yield self._progress
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await changed.wait()
        yield self._outcome()

    def stop(self) -> None:
        """Cancels the work; those attached get Unavailable."""
        self._task.cancel()

    def _outcome(self) -> Result:
        if self._task.cancelled():
            raise Unavailable(f"{self.key}: was stopped before its end; ask again")
        return self._task.result()


class Operations(Generic[Result]):
    """The operations of one kind, remembered by key so that a repeat gets the first answer.

    Finished ones are forgotten `keep_seconds` after their end, or when there are more than `keep`, the oldest first;
    failed ones at once, so that a repeat tries again, with other content if it likes.
    """

    def __init__(self, kind: str, keep: int = 1024, keep_seconds: float = 3600.0) -> None:
        self._kind = kind
        self._keep = keep
        self._keep_seconds = keep_seconds
        self._known: OrderedDict[str, Operation[Result]] = OrderedDict()

    def start_or_attach(
        self, key: str, fingerprint: bytes, work: Callable[[Report], Awaitable[Result]]
    ) -> Operation[Result]:
        """The operation of this key, known or new.

        Raises Conflict for the same key with other content, InvalidRequest for a key that is too long to be remembered,
        Overloaded when too many run already.
        """
        if len(key) > LONGEST_KEY:
            raise InvalidRequest(f"{self._kind}: an id of {len(key)} characters; at most {LONGEST_KEY} are taken")
        self._forget(self._keep)
        known = self._known.get(key)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Conflict(f"{self._kind} {key}: asked before with other content; use a new id for a new request")
            return known
        if len(self.running()) >= MOST_RUNNING:
            raise Overloaded(f"{self._kind} {key}: {MOST_RUNNING} others run or wait for their turn")
        self._forget(self._keep - 1)
        operation = Operation(f"{self._kind} {key}", fingerprint, work)
        self._known[key] = operation
        return operation

    def running(self) -> list[Operation[Result]]:
        """Those not ended yet."""
        return [operation for operation in self._known.values() if not operation.done]

    async def stop(self) -> None:
        """Cancels what runs and waits for its end: part of a service's drain."""
        running = self.running()
        for operation in running:
            operation.stop()
        if running:
            await asyncio.wait({operation._task for operation in running})

    def _forget(self, keep: int) -> None:
        horizon = time.monotonic() - self._keep_seconds
        for key, operation in list(self._known.items()):
            if operation.done and (operation.failed or operation.ended_at < horizon or len(self._known) > keep):
                del self._known[key]
