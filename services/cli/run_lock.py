"""One command at a time on the folder of a run. The kernel gives the lock up with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from services.cli.told import RunAlive

HOLDER = "cli.pid"


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder. Raises RunAlive when another command does."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _lock(descriptor):
            who = holder(run_dir)
            raise RunAlive(
                f"{run_dir}: the run is alive, another command follows it" + (f", process {who}" if who else "")
                + "; stop that one first"
            )  # fmt: skip
        (run_dir / HOLDER).write_text(str(os.getpid()))
        yield
    finally:
        os.close(descriptor)


def holder(run_dir: Path) -> int | None:
    """The process id of the command that has the run; None where none has, 0 where it has not said yet who it is."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(descriptor):
            return None
    finally:
        os.close(descriptor)
    try:
        return int((run_dir / HOLDER).read_text())
    except (OSError, ValueError):
        return 0


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
