"""NATS: facts that others may hear. The server's durability settings are asserted, not hoped for."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from typing import Any

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from services.common.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
# A half-open connection is noticed after two unanswered pings (the library's default: after four minutes).
PING_SECONDS = 5


class Bus:
    """A connection to NATS with JetStream."""

    def __init__(self, connection: Client, jetstream: JetStreamContext) -> None:
        self.connection = connection
        self.jetstream = jetstream

    @classmethod
    async def connect(cls, url: str, name: str, monitor_url: str | None = None) -> Bus:
        """Connects, and with a monitor URL refuses a server that does not sync every write.

        Reconnects for ever, and sends nothing late: a publish while disconnected fails at once, so that nothing takes
        effect after its sender gave up.
        """

        async def on_error(error: Exception) -> None:
            logger.warning("NATS: %s", error or type(error).__name__)

        try:
            connection = await asyncio.wait_for(
                nats.connect(
                    url,
                    name=name,
                    error_cb=on_error,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    ping_interval=PING_SECONDS,
                    max_outstanding_pings=2,
                    pending_size=0,
                ),
                CONNECT_SECONDS,
            )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            raise Unavailable(f"NATS at {url} does not answer within {CONNECT_SECONDS:.0f} s: {error!r}") from None
        if monitor_url is not None:
            await asyncio.to_thread(assert_synced, monitor_url)
        return cls(connection, connection.jetstream())

    async def close(self) -> None:
        await self.connection.close()

    async def bucket(self, name: str, ttl_seconds: float) -> KeyValue:
        """The key-value bucket whose entries vanish `ttl_seconds` after their last write; made if it is missing.

        Raises ConfigError when the bucket exists with another time to live.
        """
        try:
            bucket = await self.jetstream.key_value(name)
        except BucketNotFoundError:
            config = KeyValueConfig(bucket=name, ttl=ttl_seconds, history=1)
            bucket = await self.jetstream.create_key_value(config)
        status = await bucket.status()
        if abs((status.ttl or 0) - ttl_seconds) > 1e-6:
            raise ConfigError(f"NATS bucket {name}: expected a time to live of {ttl_seconds} s, it has {status.ttl} s")
        return bucket


def assert_synced(monitor_url: str) -> None:
    """Raises ConfigError unless the server writes JetStream data through to disk before it acknowledges.

    The default syncs about every two minutes: a power cut then loses what was acknowledged, tokens included.
    """
    with urllib.request.urlopen(f"{monitor_url}/jsz?config=true", timeout=CONNECT_SECONDS) as response:
        settings: dict[str, Any] = json.load(response).get("config") or {}
    if not settings.get("sync_always"):
        raise ConfigError(
            f"NATS at {monitor_url}: JetStream must sync every write, it has {settings or 'JetStream off'}; "
            "set jetstream { sync_interval: always } in the server's configuration"
        )
