from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2
from nats.js.kv import KeyValue

from services.common.announcements import TTL_SECONDS, Announcer, Registry, bucket_name
from services.common.bus import PING_SECONDS, Bus
from services.common.errors import ConfigError

ROLLOUT = events_pb2.WORKER_KIND_ROLLOUT
TTL = 2.0


@contextlib.asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done, "does not end when cancelled"
        if not task.cancelled():
            task.result()


@pytest.fixture
async def bus(nats_server: Any) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_server.url, "test")
    yield bus
    await bus.close()


def announcer(bus: Bus, worker_id: str = "rollout-0", describe: Any = lambda _: None, **changes: Any) -> Announcer:
    arguments = {
        "run_id": "r",
        "worker_id": worker_id,
        "kind": ROLLOUT,
        "address": "127.0.0.1:7",
        "node": "host-1",
        "instance_id": uuid.uuid4().hex,
        "describe": describe,
        "ttl_seconds": TTL,
    }
    return Announcer(bus, **{**arguments, **changes})


def ids(registry: Registry, kind: events_pb2.WorkerKind = ROLLOUT) -> list[str]:
    return [announcement.worker_id for announcement in registry.alive(kind)]


async def seen(registry: Registry, condition: Callable[[], bool], seconds: float = 5.0) -> None:
    assert await registry.wait_for(condition, seconds), "not in time"


async def test_a_worker_its_changes_and_its_withdrawal_are_seen(bus: Bus) -> None:
    state = tenant_pb2.WORKER_STATE_STARTING
    version = 0

    def describe(announcement: events_pb2.WorkerAnnouncement) -> None:
        announcement.state = state
        announcement.policy.version = version

    registry = Registry(bus, "r", ttl_seconds=TTL)
    one = announcer(bus, describe=describe)
    async with running(registry.run()):
        async with running(one.run()), running(announcer(bus, "rollout-1").run()):
            other_kind = announcer(bus, "learner-0", kind=events_pb2.WORKER_KIND_LEARNER)
            async with running(other_kind.run()):
                await seen(registry, lambda: ids(registry) == ["rollout-0", "rollout-1"])
                await seen(registry, lambda: ids(registry, events_pb2.WORKER_KIND_LEARNER) == ["learner-0"])
            found = registry.alive(ROLLOUT)[0]
            assert (found.run_id, found.address, found.pid) == ("r", "127.0.0.1:7", os.getpid())
            assert found.instance_id != registry.alive(ROLLOUT)[1].instance_id
            assert abs(found.started_at.seconds - time.time()) < 60

            state, version = tenant_pb2.WORKER_STATE_READY, 3
            one.changed()
            began = time.monotonic()
            await seen(registry, lambda: registry.alive(ROLLOUT)[0].policy.version == 3)
            assert registry.alive(ROLLOUT)[0].state == tenant_pb2.WORKER_STATE_READY
            assert time.monotonic() - began < TTL / 4, "the change waited for the next period"
        began = time.monotonic()
        await seen(registry, lambda: ids(registry) == [])
        assert time.monotonic() - began < TTL / 2, "the withdrawal was not heard; silence did it"


async def test_who_was_there_before_is_found(bus: Bus) -> None:
    async with running(announcer(bus).run()):
        late = Registry(bus, "r", ttl_seconds=TTL)
        async with running(late.run()):
            await seen(late, lambda: ids(late) == ["rollout-0"], 1.0)
    other = Registry(bus, "other", ttl_seconds=TTL)
    async with running(other.run()):
        assert not await other.wait_for(lambda: ids(other) != [], 0.3), "runs must not mix"


CHILD = """
    import asyncio, sys
    from antiphon.events.v1 import events_pb2
    from services.common.announcements import Announcer
    from services.common.bus import Bus
    from services.common.processes import die_with_parent

    die_with_parent(int(sys.argv[2]))

    async def main():
        bus = await Bus.connect(sys.argv[1], "child")
        await Announcer(
            bus, run_id="r", worker_id="rollout-9", kind=events_pb2.WORKER_KIND_ROLLOUT, address="127.0.0.1:9",
            node="host-1", instance_id="9", describe=lambda _: None, ttl_seconds=2.0,
        ).run()

    asyncio.run(main())
"""


def start_child(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), url, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


async def test_a_killed_worker_falls_silent_and_the_others_stay(bus: Bus, nats_server: Any) -> None:
    registry = Registry(bus, "r", ttl_seconds=TTL)
    child = start_child(nats_server.url)
    try:
        async with running(registry.run()), running(announcer(bus).run()):
            await seen(registry, lambda: ids(registry) == ["rollout-0", "rollout-9"], 20)
            assert registry.alive(ROLLOUT)[1].pid == child.pid
            child.kill()
            began = time.monotonic()
            await seen(registry, lambda: ids(registry) == ["rollout-0"], 10)
            # One period may have passed since it was last heard; `wait_for` looks once a second.
            assert 0.7 * TTL <= time.monotonic() - began < TTL + 1.5
    finally:
        child.kill()
        child.wait(10)


async def test_the_last_worker_s_silence_is_noticed_too(bus: Bus) -> None:
    """With nobody else to be heard, silence must not be taken for deafness."""
    registry = Registry(bus, "r", ttl_seconds=TTL)
    async with running(registry.run()):
        bucket = await bus.bucket(bucket_name("r"), TTL)
        dead = events_pb2.WorkerAnnouncement(run_id="r", worker_id="rollout-0", kind=ROLLOUT)
        await bucket.put("rollout-0", dead.SerializeToString())
        await seen(registry, lambda: ids(registry) == ["rollout-0"])
        began = time.monotonic()
        await seen(registry, lambda: ids(registry) == [], 10)
        assert 0.9 * TTL <= time.monotonic() - began < TTL + 1.5


@pytest.mark.parametrize("lost", [False, True])
async def test_nats_killed_and_restarted_loses_nobody_who_lives(bus: Bus, nats_server: Any, lost: bool) -> None:
    registry = Registry(bus, "r", ttl_seconds=TTL)
    version = 0

    def describe(announcement: events_pb2.WorkerAnnouncement) -> None:
        announcement.policy.version = version

    async with running(registry.run()), running(announcer(bus, describe=describe).run()):
        async with running(announcer(bus, "rollout-1").run()):
            await seen(registry, lambda: ids(registry) == ["rollout-0", "rollout-1"])
            nats_server.kill()
            await asyncio.sleep(0.1)
        # Nobody can be heard for longer than the time to live: that says nothing about either.
        assert not await registry.wait_for(lambda: ids(registry) != ["rollout-0", "rollout-1"], TTL + 0.5)
        if lost:
            nats_server.forget()
        version = 5
        nats_server.start()
        await seen(registry, lambda: registry.alive(ROLLOUT)[0].policy.version == 5, 10)
        version = 6
        await seen(registry, lambda: registry.alive(ROLLOUT)[0].policy.version == 6, TTL)
        await seen(registry, lambda: ids(registry) == ["rollout-0"], TTL + 3)  # the other died in the meantime


@pytest.mark.slow
async def test_a_frozen_nats_loses_nobody(bus: Bus, nats_server: Any) -> None:
    registry = Registry(bus, "r")
    async with running(registry.run()), running(announcer(bus, ttl_seconds=TTL_SECONDS).run()):
        await seen(registry, lambda: ids(registry) == ["rollout-0"])
        os.kill(nats_server.pid, signal.SIGSTOP)
        try:
            assert not await registry.wait_for(lambda: ids(registry) == [], TTL_SECONDS + 4)
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        assert not await registry.wait_for(lambda: ids(registry) == [], TTL_SECONDS + 2)


async def test_announcing_is_at_least_every_quarter_of_the_time_to_live(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PING_SECONDS <= TTL_SECONDS / 4
    times: list[float] = []
    original = Bus.bucket

    async def slow(self: Bus, name: str, ttl_seconds: float) -> Any:
        await asyncio.sleep(TTL / 8)  # a slow bus must not stretch the period
        return await original(self, name, ttl_seconds)

    monkeypatch.setattr(Bus, "bucket", slow)
    async with running(announcer(bus, describe=lambda _: times.append(time.monotonic())).run()):
        await asyncio.sleep(TTL + 0.2)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) >= 4 and max(gaps) < TTL / 4 + 0.2


async def test_a_bug_in_describe_and_a_foreign_bucket_end_the_task(bus: Bus) -> None:
    def describe(announcement: events_pb2.WorkerAnnouncement) -> None:
        raise LookupError("no state")

    with pytest.raises(LookupError):
        await asyncio.wait_for(announcer(bus, describe=describe).run(), 5)
    with pytest.raises(ConfigError, match="time to live"):
        await asyncio.wait_for(announcer(bus, ttl_seconds=TTL + 1).run(), 5)
    with pytest.raises(ConfigError, match="time to live"):
        await asyncio.wait_for(Registry(bus, "r", ttl_seconds=TTL + 1).run(), 5)


async def test_changes_while_nats_is_away_do_not_spin(bus: Bus, nats_server: Any) -> None:
    described = 0

    def describe(_: events_pb2.WorkerAnnouncement) -> None:
        nonlocal described
        described += 1
        one.changed()

    one = announcer(bus, describe=describe)
    nats_server.kill()
    await asyncio.sleep(0.2)
    async with running(one.run()):
        await asyncio.sleep(1.0)
    assert described <= 4


async def test_waiting_tells_who_waits_and_ends_in_time(bus: Bus) -> None:
    registry = Registry(bus, "r", ttl_seconds=TTL)
    told: list[float] = []

    async def on_wait() -> None:
        told.append(time.monotonic())

    began = time.monotonic()
    cpu = time.process_time()
    assert not await registry.wait_for(lambda: False, 1.3, on_wait)
    assert 1.3 <= time.monotonic() - began < 4.0
    assert [at - began >= 0.9 for at in told] == [True]  # once, after a second
    assert time.process_time() - cpu < 1.0, "waiting must not spin"
    assert await registry.wait_for(lambda: True, 0.0)


async def test_a_cancellation_that_the_library_swallows_still_ends_the_tasks(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12 asyncio.wait_for, which nats-py uses, drops one that comes together with the answer."""
    swallowed = 0
    holding = False
    held = asyncio.Event()

    def swallowing(function: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            nonlocal swallowed
            try:
                if holding:
                    held.set()
                    await asyncio.Event().wait()  # until it is cancelled, and nowhere else
                return await function(*arguments, **named)
            except asyncio.CancelledError:
                swallowed += 1
                raise TimeoutError from None

        return call

    monkeypatch.setattr(KeyValue.KeyWatcher, "updates", swallowing(KeyValue.KeyWatcher.updates))
    monkeypatch.setattr(KeyValue, "put", swallowing(KeyValue.put))
    registry = Registry(bus, "r", ttl_seconds=TTL)
    async with running(registry.run()):
        async with running(announcer(bus).run()):
            await seen(registry, lambda: ids(registry) == ["rollout-0"])
        holding = True
        async with asyncio.timeout(5):
            await held.wait()
    assert swallowed >= 1
    holding = False
    one = announcer(bus, describe=lambda _: told.set())
    told = asyncio.Event()
    async with running(one.run()):
        await told.wait()  # it is about to put
        await asyncio.sleep(0)
