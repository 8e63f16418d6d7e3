"""A stream of requests, answered as the answers come: reads ahead only what there is room for.

How a refusal ends a stream: the rest of what the caller sends is read and dropped first, until it ends or pauses. A
caller that is told in the middle of its sending sees an internal error of its own library (grpcio 1.85) in place of
what it was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")

PAUSE_SECONDS = 0.5
"""A caller that has sent nothing for so long waits for us."""


@dataclass(frozen=True)
class Work(Generic[Answer]):
    """What one or several requests of a stream come to."""

    weight: int
    """Of the room that the stream has."""
    run: Callable[[], Coroutine[Any, Any, Sequence[Answer]]]


class Answering(Generic[Request, Answer]):
    """One stream. What is under way, and what the caller has not taken yet, has room for `room` in weight."""

    def __init__(
        self,
        requests: AsyncIterator[Request],
        accept: Callable[[Request], Work[Answer] | None],
        finish: Callable[[], None],
        room: int,
    ) -> None:
        """`accept` makes work of a request, or None of one that waits for others; `finish` is called at the end of the
        requests. An error that one of them or the work raises ends the stream; what is under way is cancelled.
        """
        self._requests = requests
        self._accept = accept
        self._finish = finish
        self._room = room
        self._taken = 0
        self._freed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._done: asyncio.Queue[tuple[Sequence[Answer], int] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    async def answers(self) -> AsyncGenerator[Answer, None]:
        """The answers in the order in which they come. Raises what ended the stream."""
        reading = asyncio.create_task(self._read())
        try:
            while (found := await self._done.get()) is not None:
                answers, weight = found
                for answer in answers:
                    yield answer
                self._taken -= weight
                self._freed.set()
            if self._failure is not None:
                await self._until_a_pause(reading)
                raise self._failure
        finally:
            for task in (reading, *self._tasks):
                task.cancel()

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                self._arrived.set()
                if self._failure is None:
                    await self._begin(request)
            if self._failure is None:
                self._finish()
        except Exception as error:
            self._fail(error)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._done.put_nowait(None)

    async def _begin(self, request: Request) -> None:
        try:
            work = self._accept(request)
        except Exception as error:  # the requests go on: they are to be read to their end
            self._fail(error)
            return
        if work is None:
            return
        weight = min(work.weight, self._room)  # work heavier than all the room there is runs alone
        while self._failure is None and self._taken + weight > self._room:
            self._freed.clear()
            await self._freed.wait()
        if self._failure is None:
            self._taken += weight
            task = asyncio.create_task(self._do(work, weight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _do(self, work: Work[Answer], weight: int) -> None:
        try:
            self._done.put_nowait((await work.run(), weight))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Of several errors the first is told. The reading goes on, and drops what it reads."""
        if self._failure is None:
            self._failure = error
            for task in list(self._tasks):
                task.cancel()
            self._freed.set()
            self._done.put_nowait(None)

    async def _until_a_pause(self, reading: asyncio.Task[None]) -> None:
        """Waits until the caller has sent everything, or nothing for a while."""
        while not reading.done():
            self._arrived.clear()
            arrived = asyncio.create_task(self._arrived.wait())
            await asyncio.wait({reading, arrived}, timeout=PAUSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not arrived.done():
                arrived.cancel()
                return
