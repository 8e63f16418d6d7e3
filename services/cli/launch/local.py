"""Starts and supervises the processes of a run on this machine: NATS and one process per worker.

Each is in a session of its own, so that Ctrl-C reaches the command alone, and dies with the command (the kernel's
parent-death signal). What a worker is and how it is, it says itself, over NATS. One that dies is started again within
a budget (services/cli/launch/restarts.py), as another life of the same worker, once nothing of the old one is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from services.cli.launch import exits, nats_server
from services.cli.launch.deaths import Death, describe_exit, tail
from services.cli.launch.restarts import Restarts
from services.cli.recipe import Recipe
from services.cli.run_processes import command_of, find_processes, kill_processes
from services.common.config import Config, ProcessConfig, ServiceConfig, dump
from services.common.errors import AntiphonError, Unavailable
from services.common.processes import INSTANCE_ID_VARIABLE, RUN_ID_VARIABLE, spawn
from services.rollout.config import environment as rollout_environment

logger = logging.getLogger(__name__)

NATS = "nats"
COORDINATOR = "coordinator"
LEARNER = "learner-0"
MODULES: Mapping[str, str] = {
    "rollout": "services.rollout",
    "reward": "services.reward",
    "learner": "services.learner",
    COORDINATOR: "services.coordinator",
}
StartAgain: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
SWEEP_SECONDS = 2.0
NATS_SECONDS = 1.0


class LocalLauncher:
    """The processes of one run.

    `modules` replaces the Python module of a kind of worker; kinds in `without` are not started. Each process that
    dies is started again so many times (`restarts`); `on_restart` is told each time, in a line.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        run_id: str,
        modules: Mapping[str, str] | None = None,
        *,
        without: frozenset[str] = frozenset(),
        restarts: int = 0,
        on_restart: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._without = without
        self._recipe = recipe
        self._run_dir = run_dir
        self._run_id = run_id
        self._modules = {**MODULES, **(modules or {})}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._watchers: set[asyncio.Task[None]] = set()
        self._restarts = Restarts(restarts)
        self._restarting: set[asyncio.Task[None]] = set()
        self._on_restart = on_restart
        self._stopping = False
        self.begun = False
        """Whether the run is past its start: set by whoever follows it."""
        self.nats_url = recipe.nats.url or ""
        self.nats_monitor_url = recipe.nats.monitor_url

    async def start(self) -> None:
        """Starts NATS, waits until it listens, and starts the workers; they wait for one another themselves.

        Raises ConfigError or Unavailable; what was started then is for `stop`.
        """
        for folder in ("logs", "processes"):
            (self._run_dir / folder).mkdir(parents=True, exist_ok=True)
        if not self.nats_url:
            await self._start_nats()
        for kind, count, settings in self._workers():
            if kind in self._without:
                continue
            for number in range(count):
                await self._start_worker(kind, number, settings)

    async def first_death(self) -> Death:
        """Waits for the first process that ends unasked and is not started again."""
        return await asyncio.shield(self._death)

    def owners(self) -> dict[int, str]:
        """Process id → worker id, of those that live."""
        return {p.pid: worker_id for worker_id, p in self._processes.items() if p.returncode is None}

    def log(self, worker_id: str) -> Path:
        return self._run_dir / "logs" / f"{worker_id}.log"

    def alive(self, worker_id: str) -> bool:
        process = self._processes.get(worker_id)
        return process is not None and process.returncode is None

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM to the workers, SIGKILL after the grace, NATS last, when it heard of their ends; then whatever else
        carries the run's id. The learner has its own grace beside it, for a checkpoint that it is writing.
        """
        await self._restart_nothing()
        now = time.monotonic()
        saving = self._recipe.learner.save_grace_seconds
        learner = [process for process in self._without_nats() if process is self._processes.get(LEARNER)]
        others = [process for process in self._without_nats() if process not in learner]
        await asyncio.gather(
            _ended(others, signal.SIGTERM, now + grace_seconds),
            _ended(learner, signal.SIGTERM, now + grace_seconds + saving),
        )
        if all(process.returncode is not None for process in self._without_nats()):
            await self._told()
        if await self._kill_workers():
            await self._told()
        await _ended(list(self._processes.values()), signal.SIGTERM, time.monotonic() + NATS_SECONDS)
        await self._kill_the_rest()

    async def kill(self) -> None:
        """SIGKILL to everything of the run; to NATS when it heard of the ends of the workers."""
        await self._restart_nothing()
        await self._kill_workers()
        await self._told()
        await self._kill_the_rest()

    async def _restart_nothing(self) -> None:
        """From now on; what is half started carries the run's id, and is swept away by it."""
        self._stopping = True
        restarting = set(self._restarting)
        for task in restarting:
            task.cancel()
        await asyncio.gather(*restarting, return_exceptions=True)

    async def _kill_workers(self) -> bool:
        """SIGKILL to the workers and what they left behind; whether there was anything."""
        living = [process for process in self._without_nats() if process.returncode is None]
        await _ended(living, signal.SIGKILL, time.monotonic() + SWEEP_SECONDS)
        nats = self._processes.get(NATS)
        others = [pid for pid in find_processes(self._run_id) if nats is None or pid != nats.pid]
        if others:
            listed = "; ".join(f"{pid} {command_of(pid)}" for pid in others)
            logger.warning("left behind by the workers, killed: %s", listed)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(living or others)

    async def _told(self) -> None:
        """Waits until the ends of the workers are told, for as long as that may take."""
        telling = [watcher for watcher in self._watchers if watcher.get_name() != NATS]
        if telling:
            await asyncio.wait(telling, timeout=exits.TELL_SECONDS)

    async def _kill_the_rest(self) -> None:
        await _ended(list(self._processes.values()), signal.SIGKILL, time.monotonic() + SWEEP_SECONDS)
        left = await asyncio.to_thread(kill_processes, self._run_id, SWEEP_SECONDS)
        if left:
            logger.error("still alive after SIGKILL: %s", left)

    def _without_nats(self) -> list[asyncio.subprocess.Process]:
        return [process for worker_id, process in self._processes.items() if worker_id != NATS]

    def _workers(self) -> list[tuple[str, int, Config]]:
        recipe = self._recipe
        return [
            ("learner", 1, recipe.learner),
            ("rollout", recipe.coordinator.rollout_workers, recipe.rollout),
            ("reward", recipe.coordinator.reward_workers, recipe.reward),
            (COORDINATOR, 1, recipe.coordinator),
        ]

    async def _start_nats(self, ports: tuple[int, int] = (-1, -1)) -> None:
        folder = self._run_dir / "nats"
        folder.mkdir(parents=True, exist_ok=True)
        command = [nats_server.find_binary(), "-c", str(nats_server.write_config(folder, ports))]
        process = await self._spawn(NATS, command, self._environment({}), start_again=self._start_nats_again)
        self.nats_url, self.nats_monitor_url = await nats_server.wait_until_listening(folder, process, self.log(NATS))

    async def _start_nats_again(self) -> None:
        """On the same ports, over the same store: everybody connects again by himself."""
        assert self.nats_monitor_url is not None
        client, monitor = urlsplit(self.nats_url).port, urlsplit(self.nats_monitor_url).port
        assert client is not None and monitor is not None
        await self._start_nats((client, monitor))

    async def _start_worker(self, kind: str, number: int, settings: Config) -> None:
        worker_id = f"{kind}-{number}"
        service = ServiceConfig(
            run_id=self._run_id,
            worker_id=worker_id,
            run_dir=self._run_dir,
            nats_url=self.nats_url,
            nats_monitor_url=self.nats_monitor_url,
            seed=self._recipe.run.seed,
        )
        config: ProcessConfig[Any] = ProcessConfig(service=service, model=self._recipe.model, settings=settings)
        path = self._run_dir / "processes" / f"{worker_id}.yaml"
        path.write_text(dump(config))
        command = [sys.executable, "-m", self._modules[kind], "--config", str(path)]
        own = dict(rollout_environment(self._recipe.rollout) if kind == "rollout" else _threads(kind))
        own |= visible_gpus(self._recipe, kind, number)
        environment = self._environment({**own, INSTANCE_ID_VARIABLE: service.instance_id})
        logger.info("%s has the environment of this command, all of it, and %s", worker_id, own or "nothing of its own")
        await self._spawn(worker_id, command, environment, service, lambda: self._start_worker(kind, number, settings))

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """The caller's environment, nothing taken away, and what the run and the kind of worker need."""
        everyone = {
            RUN_ID_VARIABLE: self._run_id,
            "SPT_NOENV": "1",  # setproctitle (vLLM) would overwrite /proc/PID/environ, and with it the run's id
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return {**os.environ, **everyone, **own}

    async def _spawn(
        self,
        worker_id: str,
        command: list[str],
        environment: dict[str, str],
        service: ServiceConfig | None = None,
        start_again: StartAgain | None = None,
    ) -> asyncio.subprocess.Process:
        process = await spawn(command, environment=environment, log=self.log(worker_id))
        self._processes[worker_id] = process
        watcher = asyncio.create_task(self._watch(worker_id, process, service, start_again), name=worker_id)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return process

    async def _watch(
        self,
        worker_id: str,
        process: asyncio.subprocess.Process,
        service: ServiceConfig | None,
        start_again: StartAgain | None,
    ) -> None:
        code = await process.wait()
        is_coordinator = worker_id.startswith(f"{COORDINATOR}-")
        if not self._stopping:
            may = self._restarts.allowed(worker_id, code, begun=self.begun, ends_by_itself=is_coordinator)
            if start_again is not None and may:
                restart = asyncio.create_task(self._restart(worker_id, code, service, start_again), name=worker_id)
                self._restarting.add(restart)
                restart.add_done_callback(self._restarting.discard)
            else:
                self._died(worker_id, code)
        if service is not None:
            await exits.tell_exited(service, process.pid, code, coordinator=is_coordinator)

    async def _restart(self, worker_id: str, code: int, service: ServiceConfig | None, start_again: StartAgain) -> None:
        """Another life, once nothing of the old one is left."""
        pause = self._restarts.take(worker_id)
        text = (
            f"{worker_id} ended unexpectedly ({describe_exit(code)}); started again in {pause:.0f} s, restart "
            f"{self._restarts.describe(worker_id)}"
        )
        logger.warning("%s; the end of its log:\n%s", text, tail(self.log(worker_id)))
        self._on_restart(text)
        old = self._processes[worker_id]
        try:
            if service is not None:
                left = await asyncio.to_thread(kill_processes, service.instance_id, SWEEP_SECONDS, INSTANCE_ID_VARIABLE)
                if left:
                    raise Unavailable(f"{worker_id} left {left} behind, alive after SIGKILL: it is not started again")
            await asyncio.sleep(pause)
            await start_again()
        except Exception as error:
            if self._processes[worker_id] is old or self.alive(worker_id):  # else it is watched, and has its own turn
                trace = None if isinstance(error, AntiphonError | OSError) else error
                logger.error("%s could not be started again: %s", worker_id, error, exc_info=trace)
                self._died(worker_id, code)

    def _died(self, worker_id: str, code: int) -> None:
        if not self._death.done():
            self._death.set_result(Death(worker_id, code, self.log(worker_id), self._restarts.taken(worker_id)))


def visible_gpus(recipe: Recipe, kind: str, number: int) -> dict[str, str]:
    """What CUDA shows to worker `number` of a kind: the GPUs that the recipe gives it, or all where it says nothing."""
    if kind == "learner" and recipe.learner.gpus is not None:
        chosen = recipe.learner.gpus[: recipe.learner.ranks]
    elif kind == "rollout" and recipe.rollout.gpus is not None:
        width = recipe.rollout.tensor_parallel
        chosen = recipe.rollout.gpus[number * width : (number + 1) * width]
    else:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen))}


def _threads(kind: str) -> dict[str, str]:
    """Numerical libraries of light services shall not start a thread per core; the learner decides for its ranks."""
    return {} if kind == "learner" else {"OMP_NUM_THREADS": "1"}


async def _ended(processes: list[asyncio.subprocess.Process], number: signal.Signals, end: float) -> None:
    """Sends the signal to those that live and waits for their end until `end` (time.monotonic)."""
    living = [p for p in processes if p.returncode is None]
    for process in living:
        # Not process.send_signal: it polls first, and may take the exit code away from asyncio's watcher.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
    if living:
        waits = [asyncio.create_task(process.wait()) for process in living]
        _, pending = await asyncio.wait(waits, timeout=max(0.0, end - time.monotonic()))
        for wait in pending:
            wait.cancel()
