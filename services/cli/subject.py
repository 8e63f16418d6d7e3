"""What a user names to export, ask or evaluate: a model's folder, a run, or a checkpoint of one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli.told import NoModel, NoRun, NoWeights

NEEDED = ("config.json", "tokenizer.json")
MOST_NAMED = 8


@dataclass(frozen=True)
class Subject:
    """Example: checkpoint, /w/runs/first/checkpoints/step-20, run /w/runs/first."""

    kind: Literal["model", "run", "checkpoint"]
    path: Path
    run_dir: Path | None
    """The run that it is, or is a part of; None outside of one."""

    @property
    def recipe_path(self) -> Path | None:
        return None if self.run_dir is None else self.run_dir / "recipe.yaml"


@dataclass(frozen=True)
class Weights:
    """The newest of a run, or those that were meant. Example: version 20, a checkpoint."""

    version: int
    path: Path
    exported: bool
    """A Hugging Face folder; else a checkpoint."""


def find_subject(path: Path) -> Subject:
    """Raises NoModel that says what is there instead, and what is near."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise NoModel(f"{path}: no such folder{_near(path.parent)}")
    if (path / "manifest.json.sha256").is_file():
        home = path.parent.parent
        return Subject("checkpoint", path, home if is_run(home) else None)
    if is_run(path):
        return Subject("run", path, path)
    lacks = [name for name in NEEDED if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        lacks.append("*.safetensors")
    if not lacks:
        home = path.parent.parent
        exported = path.parent.name == "export" and is_run(home)
        return Subject("model", path, home if exported else None)
    raise NoModel(f"{path}: no model, it lacks {', '.join(lacks)}; no run, it has no recipe.yaml{_near(path)}")


def find_run_folder(path: Path) -> Path:
    """Raises NoRun unless the folder is that of a run."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise NoRun(f"{path}: no such folder{_near(path.parent)}")
    if not is_run(path):
        raise NoRun(f"{path}: no run, it has no recipe.yaml and manifest.json{_near(path)}")
    return path


def is_run(folder: Path) -> bool:
    try:
        return (folder / "recipe.yaml").is_file() and "run_id" in json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return False


def weights_of_run(run_dir: Path, step: int | None = None) -> Weights:
    """The newest, or those of a Step. A checkpoint counts when it is whole by its name; its content is checked on use.

    Where a policy is there both ways, its export. Raises NoWeights that names what there is.
    """
    found = [
        *(Weights(number, path, False) for number, path in _numbered(run_dir / "checkpoints", "step")),
        *(Weights(number, path, True) for number, path in _numbered(run_dir / "export", "policy")),
    ]
    found.sort(key=lambda one: (one.version, one.exported))
    wanted = [one for one in found if step in (None, one.version)]
    if wanted:
        return wanted[-1]
    there = ", ".join(sorted({str(one.version) for one in found}, key=int))
    which = "" if step is None else f" of Step {step}"
    raise NoWeights(
        f"{run_dir}: no checkpoint or exported policy{which}" + (f"; there are those of {there}" if there else "")
    )


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    """By number, not by name: 9, 10, 100."""
    whole = {"step": "manifest.json", "policy": "config.json"}[name]
    found = []
    for path in folder.glob(f"{name}-*"):
        match = re.fullmatch(rf"{name}-(\d+)", path.name)
        if match and (path / whole).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def _near(folder: Path) -> str:
    """What could have been meant."""
    if not folder.is_dir():
        return ""
    runs = sorted(path.parent.name for path in folder.glob("*/recipe.yaml"))[:MOST_NAMED]
    models = sorted(path.parent.name for path in folder.glob("*/config.json"))[:MOST_NAMED]
    parts = [f"{what} in {folder}: {', '.join(names)}" for what, names in (("runs", runs), ("models", models)) if names]
    return f" ({'; '.join(parts)})" if parts else ""
