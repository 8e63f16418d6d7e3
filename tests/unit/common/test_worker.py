from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.grant_pb2 import GrantToken
from google.protobuf.wrappers_pb2 import StringValue

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.config import Config, ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.errors import AntiphonError, ConfigError, Conflict, Unavailable
from services.common.worker import Worker, main
from tests.contract.echo_service import EchoStub, until

ROLLOUT = events_pb2.WORKER_KIND_ROLLOUT


def service(nats_server: Any, folder: Path, **changes: Any) -> ServiceConfig:
    values = {
        "run_id": "r",
        "worker_id": "rollout-0",
        "run_dir": folder,
        "nats_url": nats_server.url,
        "nats_monitor_url": nats_server.monitor_url,
    }
    return ServiceConfig.model_validate({**values, **changes})


@contextlib.asynccontextmanager
async def listening(nats_server: Any) -> AsyncIterator[Registry]:
    bus = await Bus.connect(nats_server.url, "test")
    registry = Registry(bus, "r")
    task = asyncio.create_task(registry.run())
    yield registry
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    await bus.close()


async def ended(worker: Worker, seconds: float = 20) -> int:
    async with asyncio.timeout(seconds):
        return await worker.run()


async def test_the_life_of_a_worker(nats_server: Any, tmp_path: Path) -> None:
    events: list[str] = []
    state = tenant_pb2.WORKER_STATE_STARTING
    drain = asyncio.Event()

    def describe(announcement: events_pb2.WorkerAnnouncement) -> None:
        announcement.state = state

    async def on_drain() -> None:
        events.append("drain")
        await drain.wait()

    worker = Worker(service(nats_server, tmp_path), ROLLOUT, describe=describe, on_drain=on_drain)

    async def start() -> None:
        nonlocal state
        events.append(f"start on {worker.bus.connected}")
        state = tenant_pb2.WORKER_STATE_READY
        worker.changed()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    worker.beside("start", start)
    worker.beside("endless", endless)
    with pytest.raises(RuntimeError, match="beside"):
        _ = worker.bus
    async with listening(nats_server) as registry:
        running = asyncio.create_task(ended(worker))
        assert await registry.wait_for(
            lambda: [a.state for a in registry.alive(ROLLOUT)] == [tenant_pb2.WORKER_STATE_READY], 10
        )
        assert registry.alive(ROLLOUT)[0].address == worker.server.address
        worker.stop()
        assert await registry.wait_for(
            lambda: [a.state for a in registry.alive(ROLLOUT)] == [tenant_pb2.WORKER_STATE_STOPPING], 5
        )
        assert events == ["start on True", "drain"]
        drain.set()
        assert await running == 0
        assert events[2:] == ["cancelled"]
        assert await registry.wait_for(lambda: registry.alive(ROLLOUT) == [], 3), "not withdrawn"
    assert not worker.bus.connected


async def test_a_worker_that_shares_its_gpus_follows_the_grants_of_its_node(nats_server: Any, tmp_path: Path) -> None:
    settings = service(nats_server, tmp_path, shares_gpus=True, node="host-1")
    worker = Worker(settings, ROLLOUT)
    with pytest.raises(Unavailable, match="does not follow the grants of its node yet"):
        await worker.guard.check(GrantToken(epoch="e", sequence=1))
    async with listening(nats_server) as registry:
        running = asyncio.create_task(ended(worker))
        assert await registry.wait_for(lambda: len(registry.alive(ROLLOUT)) == 1, 10)
        (found,) = registry.alive(ROLLOUT)
        assert (found.node, found.instance_id) == ("host-1", settings.instance_id)

        async def refused() -> AntiphonError:
            with pytest.raises((Conflict, Unavailable)) as caught:
                await worker.guard.check(GrantToken(epoch="e", sequence=1))
            return caught.value

        async with asyncio.timeout(10):
            # It is announced before it follows the grants.
            while isinstance(error := await refused(), Unavailable):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "void" in str(error)
        worker.stop()
        assert await running == 0
    assert not Worker(settings, events_pb2.WORKER_KIND_COORDINATOR).guard.shares_gpus
    other = Worker(service(nats_server, tmp_path), ROLLOUT)
    await other.guard.check(GrantToken())  # its GPUs are its own


@pytest.mark.parametrize("error", [Unavailable("the engine is dead"), ZeroDivisionError("a bug")])
async def test_a_task_that_fails_ends_the_worker_with_the_cause(
    nats_server: Any, tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    drained = False

    async def on_drain() -> None:
        nonlocal drained
        drained = True

    async def failing() -> None:
        raise error

    worker = Worker(service(nats_server, tmp_path), ROLLOUT, on_drain=on_drain)
    worker.beside("engine start", failing)
    assert await ended(worker) == 1
    assert drained
    assert f"engine start failed, the process ends: {type(error).__name__}: {error}" in caplog.text
    assert ("Traceback" in caplog.text) == isinstance(error, ZeroDivisionError)


async def test_a_task_started_later_is_watched_too(nats_server: Any, tmp_path: Path) -> None:
    worker = Worker(service(nats_server, tmp_path), ROLLOUT)

    async def later() -> None:
        worker.beside("second", failing)

    async def failing() -> None:
        raise LookupError

    worker.beside("first", later)
    assert await ended(worker) == 1


async def test_a_task_cancelled_by_nobody_of_ours_is_a_failure(
    nats_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone() -> None:
        raise asyncio.CancelledError

    worker = Worker(service(nats_server, tmp_path), ROLLOUT)
    worker.beside("loop", gone)
    assert await ended(worker) == 1
    assert "loop failed" in caplog.text


@pytest.mark.parametrize("what", ["health", "describe", "nats"])
async def test_what_else_must_not_die_silently(
    nats_server: Any, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def health() -> str | None:
        raise LookupError("this is why")

    def describe(_: events_pb2.WorkerAnnouncement) -> None:
        raise LookupError("this is why")

    async def close() -> None:
        await worker.bus.connection.close()

    settings = service(nats_server, tmp_path)
    if what == "health":
        worker = Worker(settings, ROLLOUT, health_check=health)
    elif what == "describe":
        worker = Worker(settings, ROLLOUT, describe=describe)
    else:
        worker = Worker(settings, ROLLOUT)
        worker.beside("closing", close)
    assert await ended(worker) == 1
    assert ("for good" if what == "nats" else "this is why") in caplog.text


async def test_failing_while_stopping_is_no_failure_of_the_stop(nats_server: Any, tmp_path: Path) -> None:
    draining = asyncio.Event()

    async def on_drain() -> None:
        draining.set()
        await asyncio.sleep(0.1)

    async def starved() -> None:
        await draining.wait()
        raise Unavailable("my child was taken away")

    worker = Worker(service(nats_server, tmp_path), ROLLOUT, on_drain=on_drain)
    worker.beside("starved", starved)
    worker.beside("stop", _stopping(worker, 0))
    assert await ended(worker) == 0


def _stopping(worker: Worker, code: int) -> Any:
    async def stop() -> None:
        worker.stop(code)

    return stop


async def test_the_exit_code_asked_for_is_returned(nats_server: Any, tmp_path: Path) -> None:
    worker = Worker(service(nats_server, tmp_path), ROLLOUT)
    worker.beside("stop", _stopping(worker, 3))
    assert await ended(worker) == 3


@pytest.mark.parametrize("how", ["hangs", "raises"])
async def test_a_drain_that_fails_or_hangs_does_not_keep_the_process(
    nats_server: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_drain() -> None:
        if how == "raises":
            raise LookupError
        await asyncio.Event().wait()

    worker = Worker(service(nats_server, tmp_path), ROLLOUT, on_drain=on_drain, drain_seconds=0.1)
    worker.beside("stop", _stopping(worker, 0))
    assert await ended(worker, 10) == 1
    assert "draining" in caplog.text


async def test_what_keeps_it_from_starting_is_said(
    nats_server: Any, make_nats_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    default = make_nats_server(synced=False)
    assert await ended(Worker(service(default, tmp_path), ROLLOUT)) == 1
    assert "sync_interval: always" in caplog.text

    first = Worker(service(nats_server, tmp_path), ROLLOUT)
    running = asyncio.create_task(ended(first))
    await until(lambda: first.server.port != 0)
    second = Worker(service(nats_server, tmp_path, port=first.server.port), ROLLOUT)
    assert await ended(second) == 1
    assert f"127.0.0.1:{first.server.port}" in caplog.text
    first.stop()
    assert await running == 0

    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        Worker(service(nats_server, tmp_path, host="0.0.0.0"), ROLLOUT)


# The process


class Settings(Config):
    letters: int = 1


SCRIPT = """
    import asyncio, sys, time
    from antiphon.events.v1 import events_pb2
    from services.common.config import Config
    from services.common.processes import die_with_parent
    from services.common.worker import Worker, main

    class Settings(Config):
        letters: int = 1

    async def build(process):
        die_with_parent(int(sys.argv.pop()))

        async def drain():
            print("drained", process.settings.letters, flush=True)

        worker = Worker(process.service, events_pb2.WORKER_KIND_ROLLOUT, on_drain=drain)
        if process.model.path == "stuck":
            worker.beside("stuck", lambda: asyncio.to_thread(time.sleep, 100))
        return worker

    sys.exit(main("services.echo", Settings, build, sys.argv[1:3]))
"""


def written(nats_server: Any, folder: Path, model: str = "m") -> Path:
    path = folder / "rollout-0.yaml"
    process = ProcessConfig[Settings](
        service=service(nats_server, folder), model=ModelConfig(path=model), settings=Settings(letters=7)
    )
    path.write_text(dump(process))
    return path


@pytest.fixture
def config_file(nats_server: Any, tmp_path: Path) -> Path:
    return written(nats_server, tmp_path)


@contextlib.contextmanager
def started(config_file: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), "--config", str(config_file), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    yield process
    process.kill()
    process.wait(10)


async def test_a_worker_process_from_config_to_sigterm(config_file: Path, nats_server: Any) -> None:
    with started(config_file) as process:
        async with listening(nats_server) as registry:
            assert await registry.wait_for(lambda: len(registry.alive(ROLLOUT)) == 1, 20)
            found = registry.alive(ROLLOUT)[0]
            assert (found.worker_id, found.pid, found.run_id) == ("rollout-0", process.pid, "r")
            peer = Peer(found.worker_id, found.address)
            with pytest.raises(Exception, match="UNIMPLEMENTED"):
                await peer.call(EchoStub(peer.channel).one, StringValue(), deadline_seconds=5)
            await peer.close()
            process.send_signal(signal.SIGTERM)
            output, errors = await asyncio.to_thread(process.communicate, None, 15)
            assert process.returncode == 0, errors
            assert output == "drained 7\n"
            assert " INFO    rollout-0 - services.common.server: SIGTERM: stopping" in errors
            assert await registry.wait_for(lambda: registry.alive(ROLLOUT) == [], 3)


async def test_a_thread_that_does_not_end_does_not_keep_the_process(nats_server: Any, tmp_path: Path) -> None:
    with started(written(nats_server, tmp_path, model="stuck")) as process:
        async with listening(nats_server) as registry:
            assert await registry.wait_for(lambda: len(registry.alive(ROLLOUT)) == 1, 20)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, None, 20)
        assert process.returncode == 1 and "threads do not end" in errors, errors


@pytest.fixture
def logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_put_back")
def test_a_wrong_configuration_is_told_without_a_traceback(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def build(process: ProcessConfig[Settings]) -> Worker:
        raise AssertionError

    config_file.write_text(config_file.read_text().replace("letters: 7", "leters: 7"))
    assert main("services.echo", Settings, build, ["--config", str(config_file)]) == 2
    errors = capsys.readouterr().err
    assert "settings.leters: unknown key; did you mean 'letters'?" in errors and "Traceback" not in errors


@pytest.mark.usefixtures("logging_put_back")
def test_a_build_that_refuses_is_told(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def build(process: ProcessConfig[Settings]) -> Worker:
        raise ConfigError("model.path: no such folder")

    assert main("services.echo", Settings, build, ["--config", str(config_file)]) == 2
    assert "model.path: no such folder" in capsys.readouterr().err
