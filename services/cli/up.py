"""`antiphon up`: NATS and the services of a recipe without a coordinator, until Ctrl-C or `antiphon down`.

    start services ──► all up: say where ──► a signal ──► StopRun to a coordinator that joined ──► end the services
                                         └── a process that ends: an error, and the same

Whoever speaks the contracts may use them. The file of a coordinator of this recipe is written, too: who starts a
process with it in another terminal has the run of `antiphon train`, and the services stay when it has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.cli.launch.local import COORDINATOR, MODULES, LocalLauncher
from services.cli.manifest import write_manifest
from services.cli.recipe import Recipe, save_recipe
from services.cli.run_lock import locked
from services.cli.signals import Signals
from services.cli.told import RunFailed
from services.cli.train import prepare
from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.config import ProcessConfig, ServiceConfig, dump
from services.common.errors import AntiphonError, ConfigError
from services.coordinator.config import CoordinatorConfig

GRACE_SECONDS = 5.0
STOP_SECONDS = 20.0  # for a coordinator that joined
STOP_CALL_SECONDS = 5.0
UP = (tenant_pb2.WORKER_STATE_READY, tenant_pb2.WORKER_STATE_STALE)
BROKEN = (tenant_pb2.WORKER_STATE_FAILED, tenant_pb2.WORKER_STATE_STOPPING)
KIND = events_pb2.WORKER_KIND_COORDINATOR


def up(recipe_path: Path, assignments: list[str], *, as_json: bool, modules: Mapping[str, str] | None = None) -> int:
    """Until a signal; its exit code. `modules` is for tests. Raises ConfigError; RunFailed when a process ends."""
    recipe = prepare(recipe_path, assignments)
    try:
        recipe.run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {recipe.run_dir}: {error.strerror}") from None
    run_id = f"{recipe.run.name}-{secrets.token_hex(3)}"
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(filename=recipe.run_dir / "cli.log", level=logging.INFO, format=form, force=True)

    async def run() -> int:
        return await _Up(recipe, run_id, modules, as_json=as_json).until_asked()

    with locked(recipe.run_dir):
        save_recipe(recipe, recipe.run_dir / "recipe.yaml")
        command = ["antiphon", "up", str(recipe_path), *assignments]
        write_manifest(recipe, run_id, command, recipe.run_dir / "manifest.json")
        return asyncio.run(run())


class _Up:
    """The services of one recipe."""

    def __init__(self, recipe: Recipe, run_id: str, modules: Mapping[str, str] | None, *, as_json: bool) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._as_json = as_json
        self._signals = Signals()
        self._launcher = LocalLauncher(recipe, recipe.run_dir, run_id, modules, without=frozenset({COORDINATOR}))

    async def until_asked(self) -> int:
        starting = asyncio.create_task(self._start())
        dying = asyncio.create_task(self._launcher.first_death())
        signalled = asyncio.create_task(self._signals.first.wait())
        try:
            await asyncio.wait({starting, dying, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is None:
                await asyncio.wait({dying, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if self._signals.number is not None:
                self._say(stopping=f"{self._signals.number.name}: ending the services; once more kills at once")
                return self._signals.exit_code
            if dying.done():
                raise RunFailed(dying.result().describe())
            starting.result()
            raise AssertionError("unreachable")
        finally:
            for task in (starting, dying, signalled):
                task.cancel()
            await asyncio.gather(starting, dying, signalled, return_exceptions=True)
            await self._end()

    async def _end(self) -> None:
        stopping = asyncio.create_task(self._stop())
        hurry = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            stopping.cancel()
            await self._launcher.kill()

    async def _stop(self) -> None:
        """A coordinator that joined comes first: what it trained is to be saved while there are services."""
        try:
            await self._stop_coordinator()
        finally:
            await self._launcher.stop(GRACE_SECONDS)

    async def _stop_coordinator(self) -> None:
        if not self._launcher.alive("nats") or not self._launcher.nats_url:
            return
        bus = await Bus.connect(self._launcher.nats_url, "cli", self._launcher.nats_monitor_url)
        registry = Registry(bus, self._run_id)
        listening = asyncio.create_task(registry.run())
        try:
            if not await registry.wait_for(lambda: bool(registry.alive(KIND)), 1.0):
                return
            (found, *_) = registry.alive(KIND)
            self._say(stopping=f"{found.worker_id} is asked to stop its run")
            peer = Peer(found.worker_id, found.address)
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(peer.channel)
            request = coordinator_pb2.StopRunRequest(reason="the services are taken down")
            await peer.call(stub.StopRun, request, deadline_seconds=STOP_CALL_SECONDS)
            await registry.wait_for(lambda: not registry.alive(KIND), STOP_SECONDS)
            await peer.close()
        except AntiphonError as error:
            self._say(stopping=f"the coordinator did not stop its run: {error}")
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await bus.close()

    async def _start(self) -> None:
        run_dir, launcher = self._recipe.run_dir, self._launcher
        self._say(run=self._run_id, folder=str(run_dir))
        await launcher.start()
        self._say(nats=launcher.nats_url, monitor=launcher.nats_monitor_url, logs=str(run_dir / "logs"))
        found = await self._all_up()
        for one in found:
            self._say(worker=one.worker_id, pid=one.pid, address=one.address)
        command = shlex.join([sys.executable, "-m", MODULES[COORDINATOR], "--config", str(self._write_coordinator())])
        self._say(coordinator=command)
        self._say(up=f"{len(found)} services are up; Ctrl-C, or `antiphon down {run_dir}`, ends them")

    def _write_coordinator(self) -> Path:
        service = ServiceConfig(
            run_id=self._run_id,
            worker_id=f"{COORDINATOR}-0",
            run_dir=self._recipe.run_dir,
            nats_url=self._launcher.nats_url,
            nats_monitor_url=self._launcher.nats_monitor_url,
            seed=self._recipe.run.seed,
        )
        process: ProcessConfig[CoordinatorConfig] = ProcessConfig(
            service=service, model=self._recipe.model, settings=self._recipe.coordinator
        )
        path = self._recipe.run_dir / "processes" / f"{COORDINATOR}-0.yaml"
        path.write_text(dump(process))
        return path

    async def _all_up(self) -> list[events_pb2.WorkerAnnouncement]:
        run, seconds = self._recipe.coordinator, self._recipe.coordinator.start_seconds
        expected = {
            events_pb2.WORKER_KIND_LEARNER: 1,
            events_pb2.WORKER_KIND_ROLLOUT: run.rollout_workers,
            events_pb2.WORKER_KIND_REWARD: run.reward_workers,
        }
        bus = await Bus.connect(self._launcher.nats_url, "cli", self._launcher.nats_monitor_url)
        registry = Registry(bus, self._run_id)
        listening = asyncio.create_task(registry.run())

        def there() -> bool:
            alive = [one for kind in expected for one in registry.alive(kind)]
            for one in alive:
                if one.state in BROKEN:
                    log = self._launcher.log(one.worker_id)
                    raise RunFailed(f"{one.worker_id} did not come up; its log is {log}")
            return all(
                sum(one.state in UP for one in registry.alive(kind)) >= count for kind, count in expected.items()
            )

        try:
            if not await registry.wait_for(there, seconds):
                heard = sorted(one.worker_id for kind in expected for one in registry.alive(kind))
                raise RunFailed(
                    f"not all services are up after start_seconds {seconds:.0f}; heard of: "
                    f"{', '.join(heard) or 'none'}; logs in {self._recipe.run_dir / 'logs'}"
                )
            return [one for kind in expected for one in registry.alive(kind)]
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await bus.close()

    def _say(self, **what: Any) -> None:
        """A JSON object, or a line: NAME VALUE, …; a single value stands for itself."""
        if self._as_json:
            print(json.dumps(what, ensure_ascii=False), flush=True)
        elif "coordinator" in what:
            print(f"a coordinator joins them by:\n  {what['coordinator']}", flush=True)
        elif len(what) == 1:
            print(*what.values(), flush=True)
        else:
            print(", ".join(f"{name} {value}" for name, value in what.items()), flush=True)
