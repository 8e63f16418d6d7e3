"""The folder of a run, as far as its weights are looked for."""

from __future__ import annotations

import json
from pathlib import Path


def make_run(folder: Path, *, steps: tuple[int, ...] = (), policies: tuple[int, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    (folder / "manifest.json").write_text('{"run_id": "story-0a1b2c"}')
    for step in steps:
        path = folder / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps({"policy": {"version": str(step)}}))
        (path / "manifest.json.sha256").write_text("")
    for policy in policies:
        path = folder / "export" / f"policy-{policy}"
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
    return folder
