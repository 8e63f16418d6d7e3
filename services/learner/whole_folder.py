"""A folder that is there whole or not at all: written aside, synced, and only then given its name.

    parent/.NAME.HEX.partial/   while it is written, or deleted
    parent/NAME/                when it is whole

Who writes holds a lock on the folder aside, which the kernel gives up with the process. So what a killed process left
is told from what another one is writing now, and the next writer in the same parent removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

from services.common.errors import InvalidRequest

logger = logging.getLogger(__name__)

SUFFIX = ".partial"


def check_target(what: str, path: Path) -> None:
    """Raises InvalidRequest unless `path` is absolute, free, and in a folder that exists; `what` begins its message."""
    if not path.is_absolute() or "\0" in str(path):
        raise InvalidRequest(f"{what} {path}: expected an absolute path")
    if os.path.lexists(path):
        raise InvalidRequest(f"{what} {path}: it exists, and nothing is ever replaced: name another path")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{what} {path}: there is no folder {path.parent}")


class WholeFolder:
    """One folder in the making. `publish` or `discard` it.

    Raises InvalidRequest when the path is taken or cannot be, OSError when the disk refuses.
    """

    def __init__(self, what: str, path: Path) -> None:
        check_target(what, path)
        remove_leftovers(path.parent)
        self._what = what
        self._path = path
        self.aside = _aside(path)
        """Where to write."""
        self.aside.mkdir(mode=0o755)
        self._lock = _locked(self.aside)

    def publish(self) -> None:
        """Gives it its name, and returns when it would survive a loss of power. What is in it is synced before."""
        for folder, _, names in os.walk(self.aside, topdown=False):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        check_target(self._what, self._path)
        self.aside.rename(self._path)
        self._unlock()
        sync(self._path.parent)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.aside, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove(path: Path) -> None:
    """Deletes a folder: it loses its name at once, and its content then. Raises OSError."""
    aside = _aside(path)
    path.rename(aside)
    sync(path.parent)
    shutil.rmtree(aside)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left half written, or half deleted, in `parent`; what is written now stays."""
    for folder in parent.glob(f".*{SUFFIX}"):
        if not folder.is_dir() or folder.is_symlink():
            continue
        lock = _locked(folder)
        if lock is not None:
            logger.warning("%s: what a process that was killed had not finished is removed", folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def sync(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}{SUFFIX}"


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock; None where another process has it, or the file system knows none."""
    descriptor: int | None = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor
