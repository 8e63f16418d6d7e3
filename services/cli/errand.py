"""Services that are started for one piece of work and taken down after it: answers to prompts, without a Step.

start services ──► follow the coordinator's events ──► RunEnded ──► take everything down
      └── a signal, or a process that dies ───────────────────────► the same, at once
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.cli.launch.local import COORDINATOR, LocalLauncher
from services.cli.recipe import Recipe, save_recipe
from services.cli.signals import Signals
from services.cli.told import RunFailed
from services.cli.view import RunProgress, View, make_view
from services.cli.watch import Watcher
from services.coordinator.config import AnswersConfig

MODULE = "services.coordinator.answers"
GRACE_SECONDS = 5.0
LAST_WORD_SECONDS = 2.0
NOT_SCORED = frozenset({"reward"})


class Interrupted(Exception):
    """A signal ended it; everything is down."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """A folder for the files of the services. It goes, unless the work failed: then its logs are needed."""
    folder = Path(tempfile.mkdtemp(prefix=f"antiphon-{what}-"))
    try:
        yield folder
    except RunFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def answers(
    recipe: Recipe, folder: Path, *, score: bool, quiet: bool, modules: Mapping[str, str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Every answer to the held-out prompts of the recipe by its model, by data set (services/coordinator/answers.py).

    `quiet`: nothing is told on stderr. `modules` is for tests. Raises RunFailed with the reason, Interrupted.
    """
    settings = AnswersConfig.model_validate({**recipe.coordinator.model_dump(), "score": score})
    recipe = recipe.model_copy(update={"coordinator": settings})
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(filename=folder / "cli.log", level=logging.INFO, format=form, force=True)
    asyncio.run(_run(recipe, folder, {COORDINATOR: MODULE, **(modules or {})}, score=score, quiet=quiet))
    found = {}
    for path in sorted((folder / "evaluations").glob("*.jsonl")):
        found[path.stem.rpartition("-v")[0]] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


async def _run(recipe: Recipe, folder: Path, modules: Mapping[str, str], *, score: bool, quiet: bool) -> None:
    signals = Signals()
    progress = RunProgress()
    view = None if quiet else make_view(progress, stream=sys.stderr)
    run_id = f"{recipe.run.name}-{secrets.token_hex(3)}"
    save_recipe(recipe, folder / "recipe.yaml")
    launcher = LocalLauncher(recipe, folder, run_id, modules, without=frozenset() if score else NOT_SCORED)
    following = asyncio.create_task(_follow(launcher, run_id, folder, progress, view))
    dying = asyncio.create_task(launcher.first_death())
    signalled = asyncio.create_task(signals.first.wait())
    ticking = asyncio.create_task(_tick(view))
    try:
        await asyncio.wait({following, dying, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done() and not _well(following, progress):
            # A death and the failure it caused come in any order: both are told.
            await asyncio.wait({following, dying}, timeout=LAST_WORD_SECONDS)
    finally:
        for task in (following, signalled, ticking):
            task.cancel()
        death = dying.result() if dying.done() and not dying.cancelled() else None
        dying.cancel()
        if signals.number is not None:
            await launcher.kill()
        else:
            await launcher.stop(GRACE_SECONDS)
        if view is not None:
            view.close()
    if signals.number is not None:
        raise Interrupted(signals.exit_code)
    if _well(following, progress):
        return
    reasons = []
    if progress.ended is not None:
        reasons.append(progress.ended.reason)
    elif following.done() and not following.cancelled() and (error := following.exception()) is not None:
        reasons.append(f"{type(error).__name__}: {error}")
    if death is not None and (death.worker_id != f"{COORDINATOR}-0" or not reasons):
        reasons.append(death.describe())
    raise RunFailed("\n".join([*reasons, f"logs in {folder / 'logs'}"]))


def _well(following: asyncio.Task[None], progress: RunProgress) -> bool:
    over = following.done() and not following.cancelled() and following.exception() is None
    return over and progress.ended is not None and progress.ended.outcome == "finished"


async def _follow(launcher: LocalLauncher, run_id: str, folder: Path, progress: RunProgress, view: View | None) -> None:
    await launcher.start()
    watcher = Watcher(run_id, launcher.nats_url, launcher.nats_monitor_url, folder / "events.jsonl")
    try:
        async for event in watcher.events():
            if view is None:
                progress.note(event)
            else:
                view.note(event)
    finally:
        await watcher.close()


async def _tick(view: View | None) -> None:
    while view is not None:
        view.tick()
        await asyncio.sleep(1.0)
