"""How workers make themselves known: each keeps its own key alive in a NATS bucket with a time to live."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable

import nats.errors
from antiphon.events.v1 import events_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from services.common.bus import Bus

logger = logging.getLogger(__name__)

TTL_SECONDS = 12.0
PERIOD_SECONDS = 3.0


def bucket_name(run_id: str) -> str:
    return f"workers-{run_id}"


class Announcer:
    """Keeps one worker's announcement alive. `describe` fills in what changes (state, policy)."""

    def __init__(
        self,
        bus: Bus,
        run_id: str,
        worker_id: str,
        kind: events_pb2.WorkerKind.ValueType,
        address: str,
        describe: Callable[[events_pb2.WorkerAnnouncement], None],
    ) -> None:
        self._bus = bus
        self._run_id = run_id
        self._worker_id = worker_id
        self._describe = describe
        self._changed = asyncio.Event()
        started = Timestamp()
        started.GetCurrentTime()
        self._announcement = events_pb2.WorkerAnnouncement(
            run_id=run_id,
            worker_id=worker_id,
            kind=kind,
            address=address,
            node=socket.gethostname(),
            instance_id=uuid.uuid4().hex,
            pid=os.getpid(),
            started_at=started,
        )

    def changed(self) -> None:
        """Announces the new state now instead of at the next period."""
        self._changed.set()

    async def run(self) -> None:
        """Announces until cancelled, then withdraws. A bus that is away is waited for: the loop tries again."""
        try:
            while True:
                self._changed.clear()
                await self._announce_once()
                try:
                    await asyncio.wait_for(self._changed.wait(), PERIOD_SECONDS)
                except TimeoutError:
                    pass
        finally:
            await self._withdraw()

    async def _announce_once(self) -> None:
        self._describe(self._announcement)
        try:
            bucket = await self._bus.bucket(bucket_name(self._run_id), TTL_SECONDS)
            await bucket.put(self._worker_id, self._announcement.SerializeToString())
        except (nats.errors.Error, TimeoutError) as error:
            logger.warning("announcement not heard: %r; trying again in %.0f s", error, PERIOD_SECONDS)

    async def _withdraw(self) -> None:
        try:
            bucket = await self._bus.bucket(bucket_name(self._run_id), TTL_SECONDS)
            await asyncio.wait_for(bucket.delete(self._worker_id), 1.0)
        except (nats.errors.Error, TimeoutError):
            pass  # the time to live does it


class Registry:
    """The workers of a run as they announce themselves; those not heard of for the time to live are gone.

    Expiry writes no event, so silence is measured here, by this process's own monotonic clock.
    """

    def __init__(self, bus: Bus, run_id: str) -> None:
        self._bus = bus
        self._run_id = run_id
        self._heard: dict[str, tuple[float, events_pb2.WorkerAnnouncement]] = {}
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                bucket = await self._bus.bucket(bucket_name(self._run_id), TTL_SECONDS)
                watcher = await bucket.watchall()
                try:
                    async for entry in watcher:
                        if entry is not None:
                            self._note(entry.key, entry.value)
                finally:
                    await watcher.stop()
            except (nats.errors.Error, TimeoutError) as error:
                logger.warning("listening for workers: %r; trying again", error)
            await asyncio.sleep(1.0)

    def _note(self, worker_id: str, value: bytes | None) -> None:
        if value:
            announcement = events_pb2.WorkerAnnouncement.FromString(value)
            self._heard[worker_id] = (time.monotonic(), announcement)
        else:  # deleted
            self._heard.pop(worker_id, None)
        self._news.set()
        self._news = asyncio.Event()

    def alive(self, kind: events_pb2.WorkerKind.ValueType) -> list[events_pb2.WorkerAnnouncement]:
        """Workers of a kind heard of within the time to live, by worker id."""
        horizon = time.monotonic() - TTL_SECONDS
        found = [a for heard, a in self._heard.values() if heard >= horizon and a.kind == kind]
        return sorted(found, key=lambda a: a.worker_id)

    async def wait_for(
        self, condition: Callable[[], bool], deadline_seconds: float, on_wait: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Waits until the condition holds after some announcement; False when the deadline passed first."""
        end = time.monotonic() + deadline_seconds
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), min(left, 1.0))
            except TimeoutError:
                if on_wait is not None:
                    await on_wait()
        return True
