"""Looking into the ledger of a run, dead or alive, without touching it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any


def ledger_rows(run_dir: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows that run.db answers."""
    with contextlib.closing(sqlite3.connect(f"file:{run_dir}/run.db?mode=ro", uri=True)) as db:
        return db.execute(query, values).fetchall()
