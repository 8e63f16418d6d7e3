"""Data sets of the Hugging Face Hub, fetched by the library `datasets` in a process of its own.

The library is large and optional; the coordinator's process never loads it. What it saves to disk is read as such.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.coordinator.data.arrow_rows import read_arrow
from services.coordinator.sources import locate

FETCH_SECONDS = 1800.0
INSTALL = ".venv/bin/uv pip install --python .venv/bin/python --no-deps -r deploy/constraints/datasets.lock"


def read_hub(name: str, split: str | None, subset: str | None, revision: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one split. Raises ConfigError without the library, and with its words when it cannot fetch them."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{name}: is no file or folder here; as a name on the Hub it needs the library datasets: {INSTALL}"
        )
    with tempfile.TemporaryDirectory(prefix="antiphon-hub-") as folder:
        _fetch(name, split, subset, revision, Path(folder) / "saved")
        for file in locate([str(Path(folder) / "saved")], "arrow", None).files:
            yield from read_arrow(file)


def _fetch(name: str, split: str | None, subset: str | None, revision: str | None, into: Path) -> None:
    request = {"name": name, "split": split, "subset": subset, "revision": revision, "parent": os.getpid()}
    command = [sys.executable, "-m", "services.coordinator.data.datasets_process", json.dumps(request), str(into)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name}: was not fetched within {FETCH_SECONDS:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"{name}: the library datasets cannot fetch it: {last[0]}")
