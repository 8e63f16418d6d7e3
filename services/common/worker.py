"""One worker process: what the `__main__` of every service would repeat.

    async def build(process: ProcessConfig[RolloutConfig]) -> Worker:
        service = Rollout(process)                                   # the domain object
        worker = Worker(
            process.service,
            events_pb2.WORKER_KIND_ROLLOUT,
            health_check=service.health_check,                       # None: fine; text: what is wrong
            describe=service.describe,                               # fills in state and policy of the announcement
            on_drain=service.drain,                                  # stop: let work end or abort it, end children
        )
        service.on_change = worker.changed                           # announce a new state at once
        worker.server.add(add_RolloutServiceServicer_to_server, RolloutServicer(service), FULL_NAME)
        worker.beside("engine start", service.start)                 # while serving; if it raises, the process ends
        return worker

    if __name__ == "__main__":
        sys.exit(main("services.rollout", RolloutConfig, build))

Order: signals → NATS → gRPC server → `beside` tasks and announcement → serve until SIGTERM, SIGINT, `stop` or a failure
→ state STOPPING, health NOT_SERVING → `on_drain` → calls end → tasks cancelled → announcement withdrawn → NATS closed.
`worker.bus` exists from the moment the `beside` tasks start (a coordinator makes its Registry in one of them).
`worker.guard` exists from the start; what touches GPUs asks it first.
A task that raises, a health check that raises and a NATS connection closed for good end the process with exit code 1
and the cause in the log; nothing dies silently. A second signal ends the process at once (children die with it).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common import logs
from services.common.announcements import Announcer
from services.common.bus import Bus
from services.common.config import Config, ProcessConfig, ServiceConfig, load_process_config
from services.common.errors import AntiphonError, ConfigError
from services.common.server import HealthCheck, Server
from services.common.tenancy import TenantGuard

logger = logging.getLogger(__name__)

# How long each part of a stop may take: together less than the 30 s in which everything of a run must be gone.
DRAIN_SECONDS = 10.0
GRACE_SECONDS = 5.0
CANCEL_SECONDS = 3.0
EXIT_SECONDS = 2.0

Settings = TypeVar("Settings", bound=Config)


class Worker:
    """One worker of a run: a gRPC server, its announcement, and the tasks beside them."""

    def __init__(
        self,
        service: ServiceConfig,
        kind: events_pb2.WorkerKind,
        *,
        health_check: HealthCheck | None = None,
        describe: Callable[[events_pb2.WorkerAnnouncement], None] | None = None,
        on_drain: Callable[[], Awaitable[None]] | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        if service.host in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"service.host: {service.host!r} is no address that others can call; "
                "give the one of the network that the workers share"
            )
        self._service = service
        self._kind = kind
        self._describe = describe
        self._on_drain = on_drain
        self._drain_seconds = drain_seconds
        self.server = Server(service.host, service.port, health_check or _always_well)
        # A coordinator hands GPUs over and uses none.
        sharing = service.shares_gpus and kind != events_pb2.WORKER_KIND_COORDINATOR
        self.guard = TenantGuard(service, shares_gpus=sharing)
        self._bus: Bus | None = None
        self._announcer: Announcer | None = None
        self._waiting: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._exit_code = 0

    @property
    def bus(self) -> Bus:
        """The connection to NATS; there once `run` has connected."""
        if self._bus is None:
            raise RuntimeError("the bus is connected by Worker.run; use it in a `beside` task")
        return self._bus

    def beside(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work()` beside the server, from when it serves. It may end; if it raises, the process ends, code 1."""
        if self._bus is None:
            self._waiting.append((name, work))
        else:
            self._start(name, work)

    def changed(self) -> None:
        """Announces the new state now; call it whenever `describe` would say something else."""
        if self._announcer is not None:
            self._announcer.changed()

    def stop(self, exit_code: int = 0) -> None:
        """Makes `run` drain and return the code, unless something failed before."""
        self._exit_code = self._exit_code or exit_code
        self.server.request_stop()

    async def run(self) -> int:
        """Serves until stopped; returns the exit code of the process."""
        self.server.handle_signals()
        try:
            self._bus = await Bus.connect(
                self._service.nats_url, self._service.worker_id, self._service.nats_monitor_url
            )
            await self.server.start()
        except (AntiphonError, OSError) as error:
            self._failed("start", error)
            if self._bus is not None:
                await self._bus.close()
            return self._exit_code
        self._announcer = Announcer(
            self._bus,
            run_id=self._service.run_id,
            worker_id=self._service.worker_id,
            kind=self._kind,
            address=self.server.address,
            node=self._service.node,
            instance_id=self._service.instance_id,
            describe=self._fill_in,
        )
        announcing = self._start("announcements", self._announcer.run)
        self._start("connection to NATS", self._bus.wait_lost)
        if self.guard.shares_gpus:
            self._start("grants", functools.partial(self.guard.run, self._bus))
        for name, work in self._waiting:
            self._start(name, work)
        try:
            await self.server.serve_until_stopped(self._drain, GRACE_SECONDS)
        except Exception as error:  # of the health check; the server has logged it
            logger.error("the server stopped because of %s: %s", type(error).__name__, error)
            self.stop(1)
        finally:
            self._stopping = True
            others = self._tasks - {announcing}
            await _cancelled(others)
            await _cancelled({announcing})  # last: it withdraws
            await self._bus.close()
        return self._exit_code

    def _start(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work()
            except asyncio.CancelledError:
                if not self._stopping:  # nobody of ours cancelled it
                    self._failed(name, RuntimeError("was cancelled"))
                raise
            except Exception as error:
                self._failed(name, error)

        task = asyncio.create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _failed(self, name: str, error: Exception) -> None:
        trace = None if isinstance(error, AntiphonError | OSError) else error
        if self._stopping:  # what it needed was taken away; the stop itself went well
            logger.warning("%s failed while stopping: %s: %s", name, type(error).__name__, error, exc_info=trace)
            return
        logger.error("%s failed, the process ends: %s: %s", name, type(error).__name__, error, exc_info=trace)
        self.stop(1)

    def _fill_in(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        if self._describe is not None:
            self._describe(announcement)
        if self._stopping:
            announcement.state = tenant_pb2.WORKER_STATE_STOPPING

    async def _drain(self) -> None:
        self._stopping = True
        self.changed()
        if self._on_drain is None:
            return
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._on_drain()
        except TimeoutError:
            logger.error("draining did not end within %.0f s; going on without", self._drain_seconds)
            self.stop(1)
        except Exception:
            logger.exception("draining failed")
            self.stop(1)


async def _always_well() -> str | None:
    return None


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits for them, a few seconds at most."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in pending:
            logger.error("%s does not end when cancelled; left behind", task.get_name())


def main(
    program: str,
    settings: type[Settings],
    build: Callable[[ProcessConfig[Settings]], Awaitable[Worker]],
    arguments: list[str] | None = None,
) -> int:
    """Parses `--config FILE`, sets up logging, builds the worker inside the event loop and runs it: the exit code.

    2 for a configuration that is wrong, 1 for a failure, 0 for a stop that was asked for.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a ProcessConfig in YAML")
    path = parser.parse_args(arguments).config
    try:
        process = load_process_config(settings, path)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    logs.configure(process.service.worker_id, process.service.log_level)

    async def serve() -> int:
        try:
            worker = await build(process)
        except AntiphonError as error:
            logger.error("cannot start: %s: %s", type(error).__name__, error)
            return 2 if isinstance(error, ConfigError) else 1
        code = await worker.run()
        _exit_for_sure(code)
        return code

    return asyncio.run(serve())


def _exit_for_sure(code: int) -> None:
    """Python waits for every thread before it exits, for ever; from now on at most a few seconds."""

    def end() -> None:
        names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        logger.error("threads do not end within %.0f s, the process ends without: %s", EXIT_SECONDS, ", ".join(names))
        os._exit(code or 1)

    timer = threading.Timer(EXIT_SECONDS, end)
    timer.daemon = True
    timer.start()
