"""What all tests share: a real NATS server, and the rule that only tests marked `gpu` may be skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.processes import die_with_parent

START_SECONDS = 20.0
SYSTEM = "tests/system/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `pytest -n 2` may run beside what.

    A file stays together, so that its fixtures are made once. The tests of real engines and learners, each of which
    keeps more than a core busy, stay together all: never two beside each other. They take longest, and begin first.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SYSTEM if nodeid.startswith(SYSTEM) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith(SYSTEM))
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself for any other reason was not run, and says so as a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and only tests marked gpu may be: {report.longrepr}"
    return report


class NatsServer:
    """One nats-server with JetStream on loopback. The first `start` picks free ports, later ones take them again."""

    def __init__(self, folder: Path, *, synced: bool = True) -> None:
        self._folder = folder
        self._synced = synced
        self._port = -1
        self._monitor_port = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self._monitor_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server and returns when it listens."""
        settings = self._folder / "nats.conf"
        sync = "sync_interval: always, " if self._synced else ""
        settings.write_text(
            f'listen: "127.0.0.1:{self._port}"\n'
            f'http: "127.0.0.1:{self._monitor_port}"\n'
            f'ports_file_dir: "{self._folder}"\n'
            f'jetstream {{ {sync}store_dir: "{self._folder}" }}\n'
        )
        parent = os.getpid()
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binary(), "-c", str(settings)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
            )
        ports = self._folder / f"nats-server_{self._process.pid}.ports"
        end = time.monotonic() + START_SECONDS
        while not (ports.exists() and ports.read_bytes()):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"nats-server does not listen:\n{(self._folder / 'nats.log').read_text()[-2000:]}")
            time.sleep(0.01)
        found = json.loads(ports.read_text())
        self._port = int(found["nats"][0].rpartition(":")[2])
        self._monitor_port = int(found["monitoring"][0].rpartition(":")[2])

    def stop(self) -> None:
        """SIGTERM, and waits for the end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._end(signal.SIGKILL)

    def forget(self) -> None:
        """Removes what a stopped server stored, as a lost disk would."""
        shutil.rmtree(self._folder / "jetstream")

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(number)
            self._process.wait(START_SECONDS)


def _binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "no nats-server beside the interpreter or on PATH: install the development requirements"
    return found


@pytest.fixture
def make_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NatsServer]]:
    """Makes running servers, `make_nats_server(synced=True)`, and ends them with the test."""
    servers: list[NatsServer] = []

    def make(*, synced: bool = True) -> NatsServer:
        server = NatsServer(tmp_path_factory.mktemp("nats"), synced=synced)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def nats_server(make_nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A running server as a run has it: `.url`, `.monitor_url`; `.kill()` and `.start()` restart it in place."""
    return make_nats_server()
