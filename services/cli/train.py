"""`antiphon train`: one run from its start to its end, whatever ends it; nothing is left behind.

    start services ──► follow the coordinator's events ──► RunEnded ──► stop services ──► closing lines
          │                        │
          └── a signal, or a process that dies for good ──► StopRun, wait for RunEnded (bounded) ──► the same
                                   └── a second signal ──► SIGKILL to all

A process that dies is started again by the launcher, and the run goes on; each of a coordinator's lives is followed.
From the first signal to the last process's end it takes the coordinator's own bound of a stop, GRACE_SECONDS, the
learner's save_grace_seconds and a few: under 30 s in all by default.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from services.cli.launch.deaths import Death
from services.cli.launch.local import LocalLauncher
from services.cli.manifest import write_manifest
from services.cli.memory import MemorySampler
from services.cli.preflight import lacks
from services.cli.recipe import Recipe, next_name, problems, read_recipe, save_recipe
from services.cli.run_lock import locked
from services.cli.signals import Signals
from services.cli.told import FAILED, OK, STOPPED, RunFailed, tell
from services.cli.view import RunProgress, View, describe_evaluation, make_view
from services.cli.watch import Watcher
from services.common.errors import AntiphonError, ConfigError

MARGIN_SECONDS = 1.0  # for RunEnded after what the coordinator takes for a stop
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
LAST_WORD_SECONDS = 2.0  # for the events of a coordinator that has ended, and for the death behind a failed run

COORDINATOR = "coordinator-0"


def prepare(recipe_path: Path, assignments: list[str]) -> Recipe:
    """The checked recipe. Raises ConfigError that lists every problem; nothing was made or started then."""
    recipe = read_recipe(recipe_path, assignments)
    found = problems(recipe) or lacks(recipe)
    if found:
        raise ConfigError("\n".join([f"{recipe_path}: {len(found)} problem(s)", *(f"  {line}" for line in found)]))
    return recipe


def train(
    recipe_path: Path, assignments: list[str], modules: Mapping[str, str] | None = None, *, as_json: bool = False
) -> int:
    """Runs to the end; returns the exit code. `modules` replaces services' modules, for tests. Raises ConfigError."""
    recipe = prepare(recipe_path, assignments)
    try:
        recipe.run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {recipe.run_dir}: {error.strerror}") from None
    run_id = f"{recipe.run.name}-{secrets.token_hex(3)}"
    command = ["antiphon", "train", str(recipe_path), *assignments]
    with locked(recipe.run_dir):
        return follow(recipe, run_id, command, modules, as_json=as_json)


def follow(
    recipe: Recipe,
    run_id: str,
    command: list[str],
    modules: Mapping[str, str] | None,
    *,
    resuming: bool = False,
    as_json: bool = False,
) -> int:
    """Runs in a folder that is there; returns the exit code. `command` is what starts such a run anew."""
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(filename=recipe.run_dir / "cli.log", level=logging.INFO, format=form, force=True)

    async def run() -> int:
        return await _Run(recipe, run_id, command, modules, resuming=resuming, as_json=as_json).to_the_end()

    return asyncio.run(run())


class _Run:
    """One run as its command sees it."""

    def __init__(
        self,
        recipe: Recipe,
        run_id: str,
        command: list[str],
        modules: Mapping[str, str] | None,
        *,
        resuming: bool,
        as_json: bool,
    ) -> None:
        self._recipe = recipe
        self._command = command
        self._run_dir = recipe.run_dir
        self._run_id = run_id
        self._resuming = resuming
        self._progress = RunProgress()
        self._as_json = as_json
        self._view: View = make_view(self._progress, as_json=as_json)
        self._launcher = LocalLauncher(
            recipe,
            self._run_dir,
            self._run_id,
            modules,
            restarts=recipe.run.restarts,
            on_restart=self._view.line,
        )
        self._watcher: Watcher | None = None
        self._memory = MemorySampler(self._run_id, self._owners, self._run_dir / "memory.jsonl")
        self._signals = Signals()

    async def to_the_end(self) -> int:
        beside = [asyncio.create_task(self._tick()), asyncio.create_task(self._memory.run())]
        following = asyncio.create_task(self._start_and_follow())
        dying = asyncio.create_task(self._launcher.first_death())
        signalled = asyncio.create_task(self._signals.first.wait())
        try:
            await asyncio.wait({following, dying, signalled}, return_when=asyncio.FIRST_COMPLETED)
            closing = asyncio.create_task(self._close(following, dying))
            killed = asyncio.create_task(self._signals.second.wait())
            await asyncio.wait({closing, killed}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                self._view.line("killing everything now")
                closing.cancel()
                following.cancel()
                await self._launcher.kill()
                return FAILED if self._signals.number is None else self._signals.exit_code
            return closing.result()
        finally:
            for task in (*beside, following, dying, signalled):
                task.cancel()
            await asyncio.gather(*beside, following, dying, signalled, return_exceptions=True)
            self._view.close()

    async def _start_and_follow(self) -> None:
        """Everything that goes well: until RunEnded was seen."""
        self._view.line(f"run {self._run_id} in {self._run_dir}")
        if not self._resuming:
            save_recipe(self._recipe, self._run_dir / "recipe.yaml")
            await asyncio.to_thread(
                write_manifest, self._recipe, self._run_id, self._command, self._run_dir / "manifest.json"
            )
        await self._launcher.start()
        self._view.line(f"nats at {self._launcher.nats_url}, monitor {self._launcher.nats_monitor_url or 'not known'}")
        names = ", ".join(f"{worker} {pid}" for pid, worker in self._launcher.owners().items())
        self._view.line(f"started {names}; logs in {self._run_dir / 'logs'}")
        self._watcher = Watcher(
            self._run_id, self._launcher.nats_url, self._launcher.nats_monitor_url, self._run_dir / "events.jsonl"
        )
        async for event in self._watcher.events():
            self._view.note(event)
            self._launcher.begun = self._launcher.begun or self._progress.phase != "start"

    async def _close(self, following: asyncio.Task[None], dying: asyncio.Task[Death]) -> int:
        """From the first thing that ended the run to the closing lines."""
        end = time.monotonic() + self._recipe.coordinator.stop_bound_seconds + MARGIN_SECONDS
        if (number := self._signals.number) is not None:
            self._view.line(f"{number.name}: stopping after the work under way; once more kills at once")
            await self._stop_run(following, number.name, end)
            code = self._signals.exit_code
        elif following.done() and self._outcome == "finished":
            code = OK
        elif following.done() and self._outcome == "stopped":
            code = STOPPED
        else:
            code = FAILED
            await self._find_culprit(following, dying, end)
        if following.cancel():
            await asyncio.wait({following}, timeout=LAST_WORD_SECONDS)
        await asyncio.to_thread(self._memory.sample, self._owners())
        await self._launcher.stop(GRACE_SECONDS)
        if self._watcher is not None:
            await self._watcher.close()
        self._view.close()
        self._conclude(following, code)
        return code

    async def _find_culprit(self, following: asyncio.Task[None], dying: asyncio.Task[Death], end: float) -> None:
        """A death and the failure it caused are seen in any order; both are shown, and the rest is stopped."""
        await asyncio.wait({following, dying}, timeout=LAST_WORD_SECONDS, return_when=asyncio.ALL_COMPLETED)
        if not dying.done():
            return
        death = dying.result()
        if self._outcome == "failed" and death.worker_id == COORDINATOR:
            return  # it ended after its last event, as it should
        self._view.line(death.describe())
        await self._stop_run(following, f"{death.worker_id} died", end)

    async def _stop_run(self, following: asyncio.Task[None], reason: str, end: float) -> None:
        """StopRun, and until `end` for RunEnded. Where no coordinator answers there is nothing to save."""
        if following.done() or self._watcher is None or not self._launcher.alive(COORDINATOR):
            return
        if await self._watcher.request_stop(reason):
            await asyncio.wait({following}, timeout=max(0.0, end - time.monotonic()))

    @property
    def _outcome(self) -> str:
        return self._progress.ended.outcome if self._progress.ended is not None else ""

    def _conclude(self, following: asyncio.Task[None], code: int) -> None:
        """Prints how it ended and how to go on."""
        line, ended = self._view.line, self._progress.ended
        error = following.exception() if following.done() and not following.cancelled() else None
        if error is not None:
            if not isinstance(error, AntiphonError | OSError):
                logging.getLogger(__name__).error("a bug", exc_info=error)
            line(f"{type(error).__name__}: {error}")
        for evaluated in self._progress.evaluations:
            line(describe_evaluation(evaluated))
        if self._memory.peak_mib:
            line(f"memory of all processes at its peak: {self._memory.summary()}")
        if ended is not None:
            line(f"run {ended.outcome}" + (f": {ended.reason}" if ended.reason else ""))
        export = ended.export_path if ended is not None else ""
        if ended is not None and export:
            line(f"policy {ended.policy.version} exported to {export}")
        line(f"files of the run: {self._run_dir}")
        if code == OK:
            return
        if code == FAILED:
            reason = str(error) if error is not None else ended.reason if ended is not None else "a process ended"
            tell(RunFailed(f"run {self._run_id}: {reason}; files of the run: {self._run_dir}"), as_json=self._as_json)
        paid = self._progress.step > 0 and (self._run_dir / "run.db").exists()
        if self._resuming or paid or any((self._run_dir / "checkpoints").glob("step-*")):
            line(f"to go on:\n  {shlex.join(['antiphon', 'resume', str(self._run_dir)])}")
        elif export:
            line(f"to go on from it:\n  {self._next_command(export)}")
        elif self._progress.steps_done == 0:
            line(f"no step was trained; to start again:\n  {self._next_command(None)}")
        else:
            line(f"the policy was not exported; to start again:\n  {self._next_command(None)}")

    def _next_command(self, export: str | None) -> str:
        """This run's command under the next free name, from the exported policy where there is one."""
        replaced = ("run.name=", "model.path=") if export else ("run.name=",)
        kept = [part for part in self._command if not part.startswith(replaced)]
        model = [f"model.path={export}"] if export else []
        return shlex.join([*kept, *model, f"run.name={next_name(self._recipe.run)}"])

    def _owners(self) -> dict[int, str]:
        return {os.getpid(): "cli", **self._launcher.owners()}

    async def _tick(self) -> None:
        while True:
            self._view.tick()
            await asyncio.sleep(1.0)
