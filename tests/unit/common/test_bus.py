from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats.errors
import pytest

from services.common.bus import CONNECT_SECONDS, Bus, assert_synced
from services.common.errors import ConfigError, Unavailable
from tests.contract.echo_service import until


@pytest.fixture
async def bus(nats_server: Any) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_server.url, "test", nats_server.monitor_url)
    yield bus
    await bus.close()


async def test_a_server_that_syncs_every_write_is_accepted(bus: Bus, nats_server: Any) -> None:
    assert bus.connected
    assert_synced(nats_server.monitor_url + "/")


async def test_a_server_with_default_settings_is_refused(make_nats_server: Callable[..., Any]) -> None:
    server = make_nats_server(synced=False)
    with pytest.raises(ConfigError, match="sync_interval: always"):
        await Bus.connect(server.url, "test", server.monitor_url)
    bus = await Bus.connect(server.url, "test")  # unasked, it is not looked at
    await bus.close()


async def test_a_monitor_that_does_not_answer_is_named(nats_server: Any) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(Unavailable, match=url):
            await Bus.connect(nats_server.url, "test", url)
    with pytest.raises(Unavailable, match="monitor"):  # something else listens there
        assert_synced(nats_server.url.replace("nats:", "http:"))


async def test_nobody_there_is_unavailable_in_a_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONNECT_SECONDS <= 10
    monkeypatch.setattr("services.common.bus.CONNECT_SECONDS", 1.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+ does not answer .*(refused|Connect)"):
            await Bus.connect(f"nats://127.0.0.1:{closed.getsockname()[1]}", "test")
        assert time.monotonic() - began < 3


async def test_what_is_sent_while_disconnected_fails_at_once_and_is_not_sent_later(
    bus: Bus, nats_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = await bus.bucket("kept", 600.0)
    await bucket.put("key", b"before")
    nats_server.kill()
    await until(lambda: not bus.connected)
    began = time.monotonic()
    with pytest.raises(nats.errors.OutboundBufferLimitError):
        await bucket.put("key", b"late")
    with pytest.raises(nats.errors.OutboundBufferLimitError):
        await bus.connection.publish("subject", b"late")
    assert time.monotonic() - began < 2.0  # not the seconds that an answer is waited for
    nats_server.start()
    await until(lambda: bus.connected, 10)
    assert (await bucket.get("key")).value == b"before"
    await bucket.put("key", b"after")
    entry = await bucket.get("key")
    assert (entry.value, entry.revision) == (b"after", 2)
    assert "NATS: " in caplog.text and "connected again" in caplog.text


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_before_a_worker_s_time_to_live(bus: Bus, nats_server: Any) -> None:
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        await until(lambda: not bus.connected, 12)
        assert time.monotonic() - began < 12
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)


async def test_a_bucket_is_made_once_and_its_time_to_live_is_checked(bus: Bus) -> None:
    first, second = await asyncio.gather(bus.bucket("workers-r", 12.0), bus.bucket("workers-r", 12.0))
    await first.put("a", b"1")
    assert (await second.get("a")).value == b"1"
    assert (await first.status()).ttl == 12.0
    with pytest.raises(ConfigError, match=r"workers-r: expected a time to live of 5\.0 s, it has 12"):
        await bus.bucket("workers-r", 5.0)


async def test_losing_the_connection_for_good_is_told_and_closing_it_is_not(
    nats_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await Bus.connect(nats_server.url, "test")
    watching = asyncio.create_task(bus.wait_lost())
    await asyncio.sleep(0)
    await bus.close()
    await asyncio.wait_for(watching, 5)  # ours: no error

    bus = await Bus.connect(nats_server.url, "test")
    watching = asyncio.create_task(bus.wait_lost())
    with caplog.at_level(logging.CRITICAL):
        await bus.connection.close()  # as the library does by itself, e.g. when it may not log in any more
    with pytest.raises(Unavailable, match="for good"):
        await asyncio.wait_for(watching, 5)
