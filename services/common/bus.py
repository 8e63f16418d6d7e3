"""NATS: facts that others may hear. The server's durability settings are asserted, not hoped for."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.request
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from services.common.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
# A half-open connection is noticed at the third unanswered ping, 9 s: before a worker's time to live (12 s) ends.
# (The library's default: after four minutes.)
PING_SECONDS = 3
REQUEST_SECONDS = 3.0

# What a bus that is away raises; anything else is a bug or a wrong setting.
AWAY = (nats.errors.Error, TimeoutError, OSError)


class Bus:
    """A connection to NATS with JetStream. Reconnects for ever; what is sent while it is away fails at once."""

    def __init__(self, connection: Client, jetstream: JetStreamContext, lost: asyncio.Event | None = None) -> None:
        self.connection = connection
        self.jetstream = jetstream
        self._lost = lost or asyncio.Event()
        self._closing = False

    @classmethod
    async def connect(cls, url: str, name: str, monitor_url: str | None = None) -> Bus:
        """Connects, and with a monitor URL refuses a server that does not sync every write.

        Nothing is sent late: a publish while disconnected fails at once, so that nothing takes effect after its sender
        gave up. Raises Unavailable when NATS or its monitor does not answer, ConfigError for its settings.
        """
        last_error: list[Exception] = []
        lost = asyncio.Event()

        async def on_error(error: Exception) -> None:
            last_error[:] = [error]
            logger.warning("NATS: %s: %s", type(error).__name__, error)

        async def on_reconnected() -> None:
            logger.warning("NATS: connected again")

        async def on_closed() -> None:
            lost.set()

        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await nats.connect(
                    url,
                    name=name,
                    error_cb=on_error,
                    reconnected_cb=on_reconnected,
                    closed_cb=on_closed,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    connect_timeout=2,
                    ping_interval=PING_SECONDS,
                    max_outstanding_pings=2,
                    pending_size=0,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            cause = last_error[0] if last_error else error
            raise Unavailable(f"NATS at {url} does not answer within {CONNECT_SECONDS:.0f} s: {cause!r}") from None
        bus = cls(connection, connection.jetstream(timeout=REQUEST_SECONDS), lost)
        if monitor_url is not None:
            try:
                await asyncio.to_thread(assert_synced, monitor_url)
            except BaseException:
                await bus.close()
                raise
        return bus

    async def close(self) -> None:
        """Ends the connection; at most a few seconds."""
        self._closing = True
        try:
            async with asyncio.timeout(2.0):
                await self.connection.close()
        except (TimeoutError, OSError, nats.errors.Error) as error:
            logger.warning("NATS: closing: %r", error)

    async def wait_lost(self) -> None:
        """Waits for ever; raises Unavailable when the connection was closed for good by anybody but `close`."""
        await self._lost.wait()
        if not self._closing:
            raise Unavailable(f"NATS closed the connection for good: {self.connection.last_error!r}")

    @property
    def connected(self) -> bool:
        """Whether the connection stands, as far as this side knows."""
        return bool(self.connection.is_connected)

    async def bucket(self, name: str, ttl_seconds: float) -> KeyValue:
        """The key-value bucket whose entries vanish `ttl_seconds` after their last write; made if it is missing.

        Raises ConfigError when the bucket exists with another time to live.
        """
        try:
            bucket = await self.jetstream.key_value(name)
        except BucketNotFoundError:
            # Several may make it at once: the same configuration again is no error to NATS.
            bucket = await self.jetstream.create_key_value(KeyValueConfig(bucket=name, ttl=ttl_seconds, history=1))
        status = await bucket.status()
        if abs((status.ttl or 0) - ttl_seconds) > 1e-6:
            raise ConfigError(f"NATS bucket {name}: expected a time to live of {ttl_seconds} s, it has {status.ttl} s")
        return bucket


def end_if_cancelled() -> None:
    """Makes up for a cancellation that nats-py swallowed: it waits with `asyncio.wait_for`, which before Python 3.12
    drops one that comes together with the answer, and catches CancelledError where it flushes.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


def assert_synced(monitor_url: str) -> None:
    """Raises ConfigError unless the server writes JetStream data through to disk before it acknowledges.

    The default syncs about every two minutes: a power cut then loses what was acknowledged, tokens included. Raises
    Unavailable when the monitor does not answer.
    """
    try:
        with urllib.request.urlopen(f"{monitor_url.rstrip('/')}/jsz?config=true", timeout=CONNECT_SECONDS) as response:
            answer = json.load(response)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"NATS monitor at {monitor_url} does not answer: {error}") from None
    settings: dict[str, Any] = answer.get("config") or {}
    if not settings.get("sync_always"):
        raise ConfigError(
            f"NATS at {monitor_url}: JetStream must sync every write, it has {settings or 'JetStream off'}; "
            "set jetstream { sync_interval: always } in the server's configuration"
        )
