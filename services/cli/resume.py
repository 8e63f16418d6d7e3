"""`antiphon resume`: takes up a run where it ended, in its own folder, under its own id.

What it is made of may not change, since the Steps before were made of it: it is refused by name. What it takes to run
(processes, deadlines, memory, more Steps) may.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.cli.manifest import changed_files
from services.cli.preflight import lacks
from services.cli.recipe import Recipe, problems, read_recipe, save_recipe
from services.cli.run_lock import locked
from services.cli.run_processes import find_processes
from services.cli.told import NoRun, RunAlive
from services.cli.train import follow
from services.common.config import parse
from services.common.errors import ConfigError

FIXED = (
    "run.name",
    "run.directory",
    "run.seed",
    "model",
    "reward",
    "coordinator.schedule",
    "coordinator.data",
    "coordinator.sampling",
    "coordinator.prompts_per_step",
    "coordinator.samples_per_prompt",
    "coordinator.algorithm",
    "coordinator.filter",
    "coordinator.scorer",
    "learner.role",
    "learner.optimizer",
)
"""Sections and keys that stay as the run began: Steps that are replayed would make another policy."""
MAY_CHANGE = ("coordinator.filter.most_extra_prompts", "coordinator.filter.when_exhausted")
"""Inside of them: they say when to give up, not what is trained."""


def resume(
    run_dir: Path, assignments: list[str], modules: Mapping[str, str] | None = None, *, as_json: bool = False
) -> int:
    """Goes on to the end; returns the exit code. `modules` is for tests. Raises ConfigError."""
    run_dir = run_dir.expanduser().resolve()
    if not (run_dir / "recipe.yaml").is_file():
        raise NoRun(f"{run_dir}: no folder of a run: there is no recipe.yaml in it")
    with locked(run_dir):
        recipe, run_id = prepare(run_dir, assignments)
        save_recipe(recipe, run_dir / "recipe.yaml")
        if recipe.nats.url is None:
            shutil.rmtree(run_dir / "nats", ignore_errors=True)  # who was alive then is not now
        command = ["antiphon", "train", str(run_dir / "recipe.yaml")]
        return follow(recipe, run_id, command, modules, resuming=True, as_json=as_json)


def prepare(run_dir: Path, assignments: list[str]) -> tuple[Recipe, str]:
    """The checked recipe and the id of the run. Raises ConfigError that says why it cannot be taken up."""
    saved = read_recipe(run_dir / "recipe.yaml", [])
    recipe = read_recipe(run_dir / "recipe.yaml", assignments)
    manifest = _manifest(run_dir)
    run_id = str(manifest["run_id"])
    if alive := find_processes(run_id):
        raise RunAlive(
            f"{run_dir}: the run is alive: {len(alive)} of its processes, e.g. {alive[0]}; wait until they ended, or "
            "stop them"
        )
    if not (run_dir / "run.db").is_file():
        raise ConfigError(
            f"{run_dir}: there is no run.db: the run ended before it trained anything; start a new one with "
            f"antiphon train {run_dir / 'recipe.yaml'} run.name=…"
        )
    if saved.run_dir.resolve() != run_dir:
        raise ConfigError(f"{run_dir}: the run was made in {saved.run_dir}; its files name one another: move it back")
    if _finished(run_dir) and recipe.coordinator.steps <= saved.coordinator.steps:
        raise ConfigError(
            f"{run_dir}: the run is finished, all {saved.coordinator.steps} Steps; for more of them say "
            f"coordinator.steps={2 * saved.coordinator.steps}, or another number above {saved.coordinator.steps}"
        )
    # Not the recipe beside it, which may have been edited.
    began = parse(Recipe, manifest["recipe"], str(run_dir / "manifest.json"))
    found = [*_changed(began, recipe), *changed_files(manifest), *problems(recipe, resuming=True), *lacks(recipe)]
    if found:
        raise ConfigError("\n".join([f"{run_dir}: {len(found)} problem(s)", *(f"  {line}" for line in found)]))
    return recipe, run_id


def _manifest(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        _ = manifest["run_id"], manifest["files"], manifest["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error!r}; without it the run has no id to go on under") from None
    return manifest


def _finished(run_dir: Path) -> bool:
    """Whether the last life of the run came to its planned end, by its events."""
    try:
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        return bool(lines) and json.loads(lines[-1]).get("runEnded", {}).get("outcome") == "finished"
    except (OSError, ValueError):
        return False


def _changed(began: Recipe, recipe: Recipe) -> list[str]:
    """What may not change and does, by key."""
    before, now = (dict(_leaves(one.model_dump(mode="json"))) for one in (began, recipe))
    nothing = object()
    return [
        f"{key}: {now.get(key, 'not there')!r}, the run began with {before.get(key, 'not there')!r}; it stays so"
        for key in sorted({*before, *now})
        if before.get(key, nothing) != now.get(key, nothing) and _is_fixed(key)
    ]


def _is_fixed(key: str) -> bool:
    return any(_within(key, one) for one in FIXED) and not any(_within(key, one) for one in MAY_CHANGE)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a tree and its dotted key."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not items:
        yield key, node
    for name, child in items:
        yield from _leaves(child, f"{key}.{name}" if key else str(name))
