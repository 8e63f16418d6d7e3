"""How workers make themselves known: each keeps its own key alive in a NATS bucket with a time to live.

A worker announces every quarter of the time to live; who has not been heard of for the whole of it is gone. While the
listener itself cannot hear (NATS away) silence says nothing, and nobody is judged by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable

import nats.errors
from antiphon.events.v1 import events_pb2
from google.protobuf.timestamp_pb2 import Timestamp
from nats.js.kv import KeyValue

from services.common.bus import AWAY, Bus, end_if_cancelled

logger = logging.getLogger(__name__)

TTL_SECONDS = 12.0


def bucket_name(run_id: str) -> str:
    return f"workers-{run_id}"


class Announcer:
    """Keeps one worker's announcement alive. `describe` fills in what changes (state, policy)."""

    def __init__(
        self,
        bus: Bus,
        *,
        run_id: str,
        worker_id: str,
        kind: events_pb2.WorkerKind,
        address: str,
        node: str,
        instance_id: str,
        describe: Callable[[events_pb2.WorkerAnnouncement], None],
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        self._bus = bus
        self._run_id = run_id
        self._worker_id = worker_id
        self._describe = describe
        self._ttl_seconds = ttl_seconds
        self._period_seconds = ttl_seconds / 4
        self._changed = asyncio.Event()
        self._heard = True
        started = Timestamp()
        started.GetCurrentTime()
        self._announcement = events_pb2.WorkerAnnouncement(
            run_id=run_id,
            worker_id=worker_id,
            kind=kind,
            address=address,
            node=node,
            instance_id=instance_id,
            pid=os.getpid(),
            started_at=started,
        )

    def changed(self) -> None:
        """Announces the new state now instead of at the next period."""
        self._changed.set()

    async def run(self) -> None:
        """Announces until cancelled, then withdraws. Waits for a bus that is away; raises what `describe` raises."""
        try:
            while True:
                began = time.monotonic()
                self._changed.clear()
                await self._announce_once()
                end_if_cancelled()
                # A period counts from the start of the last attempt: a slow answer does not make the next one late.
                left = began + self._period_seconds - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(left, 0.0)):
                        await self._changed.wait()
        finally:
            await self._withdraw()

    async def _announce_once(self) -> None:
        self._describe(self._announcement)
        value = self._announcement.SerializeToString()
        try:
            bucket = await self._bus.bucket(bucket_name(self._run_id), self._ttl_seconds)
            await bucket.put(self._worker_id, value)
        except AWAY as error:
            if self._heard:
                logger.warning("announcement not heard: %r; trying again every %.1f s", error, self._period_seconds)
            self._heard = False
            # Also when a change is waiting: a bus that is away must not be called in a tight loop.
            await asyncio.sleep(min(1.0, self._period_seconds))
        else:
            if not self._heard:
                logger.warning("announcements are heard again")
            self._heard = True

    async def _withdraw(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                bucket = await self._bus.bucket(bucket_name(self._run_id), self._ttl_seconds)
                await bucket.delete(self._worker_id)
        except AWAY:
            pass  # the time to live does it


class Registry:
    """The workers of a run as they announce themselves; those not heard of for the time to live are gone.

    Expiry writes no event, so silence is measured here, by this process's own monotonic clock. Who died just before
    this registry began to listen is counted as heard of once, and leaves after one time to live.
    """

    def __init__(self, bus: Bus, run_id: str, ttl_seconds: float = TTL_SECONDS) -> None:
        self._bus = bus
        self._run_id = run_id
        self._ttl_seconds = ttl_seconds
        # By worker id: when it was last heard of, the revision of that announcement, the announcement.
        self._heard: dict[str, tuple[float, int, events_pb2.WorkerAnnouncement]] = {}
        self._news = asyncio.Event()
        self._last_sign = time.monotonic()
        self._deaf_since: float | None = self._last_sign

    async def run(self) -> None:
        """Listens until cancelled. A bus that is away is waited for."""
        while True:
            try:
                bucket = await self._bus.bucket(bucket_name(self._run_id), self._ttl_seconds)
                await self._listen(bucket)
            except AWAY as error:
                if self._deaf_since is None:
                    logger.warning("not hearing the workers: %r; trying again", error)
                    self._deaf_since = self._last_sign
            end_if_cancelled()
            await asyncio.sleep(min(1.0, self._ttl_seconds / 8))

    async def _listen(self, bucket: KeyValue) -> None:
        """Listens until NATS was away, or nobody was heard for half a time to live.

        nats-py's watcher ends neither when its consumer is lost with a restarted server nor when the stream was made
        anew; a new one costs little, and revisions already known are not taken as signs of life.
        """
        reconnects = self._bus.connection.stats["reconnects"]
        watcher = await bucket.watchall()
        try:
            quiet_since = time.monotonic()
            while time.monotonic() - quiet_since < self._ttl_seconds / 2:
                try:
                    entry = await watcher.updates(timeout=self._ttl_seconds / 8)
                except TimeoutError:
                    await bucket.status()  # is it the workers that are silent, or NATS?
                    self._last_sign = time.monotonic()
                else:
                    quiet_since = self._last_sign = time.monotonic()
                    self._hearing()
                    if entry is not None:  # None ends the list of what was there before
                        self._note(entry)
                end_if_cancelled()
                if self._bus.connection.stats["reconnects"] != reconnects:
                    raise nats.errors.ConnectionReconnectingError
        finally:
            with contextlib.suppress(*AWAY):
                await watcher.stop()

    def _hearing(self) -> None:
        """Ends deafness: the time it lasted is nobody's silence."""
        if self._deaf_since is None:
            return
        lasted = time.monotonic() - self._deaf_since
        self._deaf_since = None
        self._heard = {key: (heard + lasted, revision, a) for key, (heard, revision, a) in self._heard.items()}

    def _note(self, entry: KeyValue.Entry) -> None:
        if entry.operation is not None or not entry.value:  # deleted
            if self._heard.pop(entry.key, None) is not None:
                self.look_again()
            return
        known = self._heard.get(entry.key)
        if known is not None and known[1] == entry.revision:
            return
        announcement = events_pb2.WorkerAnnouncement.FromString(entry.value)
        self._heard[entry.key] = (time.monotonic(), entry.revision, announcement)
        self.look_again()

    def look_again(self) -> None:
        """Makes those in `wait_for` look at their condition now: something else that it depends on has changed."""
        self._news.set()
        self._news = asyncio.Event()

    def alive(self, kind: events_pb2.WorkerKind) -> list[events_pb2.WorkerAnnouncement]:
        """Workers of a kind heard of within the time to live, by worker id."""
        now = time.monotonic() if self._deaf_since is None else self._deaf_since
        found = [a for heard, _, a in self._heard.values() if now - heard <= self._ttl_seconds and a.kind == kind]
        return sorted(found, key=lambda a: a.worker_id)

    async def wait_for(
        self,
        condition: Callable[[], bool],
        deadline_seconds: float,
        on_wait: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Waits until the condition holds, looked at after each announcement and each second (silence writes none).

        False when the deadline passed first. `on_wait` is called about every second of waiting.
        """
        now = time.monotonic()
        end = now + deadline_seconds
        next_look = now + 1.0
        while True:
            news = self._news
            if condition():
                return True
            now = time.monotonic()
            if now >= end:
                return False
            if now >= next_look:
                next_look = now + 1.0
                if on_wait is not None:
                    await on_wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(end, next_look) - time.monotonic())):
                    await news.wait()
