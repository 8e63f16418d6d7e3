"""One command at a time on the folder of a run. The kernel gives the lock up with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import ConfigError


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder. Raises ConfigError when another command does."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run_dir}: the run is alive, another command follows it; stop that one first") from None
        yield
    finally:
        os.close(descriptor)
