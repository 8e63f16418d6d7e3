"""Work that outlives the call that asked for it: it runs in a task of its own, a repeat of the call attaches to it.

A cancelled call cancels its handler at the next await, so a handler must not do the work itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from antiphon.types.v1 import progress_pb2

from services.common.errors import Conflict

Result = TypeVar("Result")
Report = Callable[[str, int, int], None]
"""report(phase, done, of): says how far the work is."""

HEARTBEAT_SECONDS = 4.0  # the contract promises a message at least every 5 s
logger = logging.getLogger(__name__)


class Operation(Generic[Result]):
    """One piece of work under way or done."""

    def __init__(self, key: str, fingerprint: bytes, work: Callable[[Report], Awaitable[Result]]) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.started = time.monotonic()
        self._progress = progress_pb2.Progress(phase="queued")
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(work(self._report))
        self._task.add_done_callback(self._ended)

    def _report(self, phase: str, done: int, of: int) -> None:
        self._progress = progress_pb2.Progress(phase=phase, done=done, of=of)
        self._wake()

    def _ended(self, task: asyncio.Future[Result]) -> None:
        if not task.cancelled() and task.exception() is not None:  # seen here, so asyncio does not complain later
            logger.warning("%s failed: %s", self.key, task.exception())
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._task.done()

    async def result(self) -> Result:
        """Waits for the end; a waiter that is cancelled leaves the work alone."""
        return await asyncio.shield(self._task)

    async def follow(self) -> AsyncIterator[progress_pb2.Progress | Result]:
        """Progress at each advance and at least every few seconds, then the result; raises what the work raised."""
        while not self._task.done():
            changed = self._changed
            yield self._progress
            await asyncio.wait({asyncio.ensure_future(changed.wait())}, timeout=HEARTBEAT_SECONDS)
        yield self._task.result()


class Operations(Generic[Result]):
    """The operations of one kind, remembered by key so that a repeat gets the first answer.

    Finished ones are forgotten after `keep_seconds` or when there are more than `keep`; failed ones at once, so that a
    repeat tries again.
    """

    def __init__(self, kind: str, keep: int = 1024, keep_seconds: float = 3600.0) -> None:
        self._kind = kind
        self._keep = keep
        self._keep_seconds = keep_seconds
        self._known: OrderedDict[str, Operation[Result]] = OrderedDict()

    def start_or_attach(
        self, key: str, fingerprint: bytes, work: Callable[[Report], Awaitable[Result]]
    ) -> Operation[Result]:
        """The operation of this key: the known one, or a new one. Raises Conflict for the same key with other content."""
        self._forget()
        known = self._known.get(key)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Conflict(f"{self._kind} {key}: asked before with other content; use a new id for a new request")
            return known
        operation = Operation(f"{self._kind} {key}", fingerprint, work)
        self._known[key] = operation
        return operation

    def running(self) -> list[Operation[Result]]:
        """Those not ended yet."""
        return [operation for operation in self._known.values() if not operation.done]

    def _forget(self) -> None:
        horizon = time.monotonic() - self._keep_seconds
        for key, operation in list(self._known.items()):
            if not operation.done:
                continue
            task = operation._task
            failed = task.cancelled() or task.exception() is not None
            if failed or operation.started < horizon or len(self._known) > self._keep:
                del self._known[key]
