"""A process that ended although nobody asked it to, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.processes import signal_name

TAIL_LINES = 20
TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Death:
    """A process that ended although nobody asked it to, and is not started again."""

    worker_id: str
    exit_code: int
    log: Path
    restarts: int = 0
    """How often it was started again before."""

    def describe(self) -> str:
        """Name, exit code, the end of the log and where all of it is."""
        how = describe_exit(self.exit_code)
        before = f", after it was started again {self.restarts} times" if self.restarts else ""
        last = f"the end of its log:\n{tail(self.log)}\nall of it: {self.log}"
        return f"{self.worker_id} ended unexpectedly ({how}){before}; {last}"


def describe_exit(code: int) -> str:
    """An exit code in words; a negative one is a signal."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def tail(log: Path) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (empty)"
