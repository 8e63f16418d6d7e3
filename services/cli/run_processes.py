"""The processes of a run, found by the run id that each carries in its environment (Linux)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from services.common.processes import RUN_ID_VARIABLE

LOOK_AGAIN_SECONDS = 0.05


def find_processes(run_id: str, variable: str = RUN_ID_VARIABLE) -> list[int]:
    """Process ids; zombies, whose environment is gone, are not among them. Other variables mark other sets."""
    wanted = f"{variable}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:  # ended, or somebody else's
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_processes(run_id: str, deadline_seconds: float, variable: str = RUN_ID_VARIABLE) -> list[int]:
    """Kills what is left of a run, or of another set; answers what could not be killed in time. New ones that appear
    are killed too.
    """
    end = time.monotonic() + deadline_seconds
    while left := find_processes(run_id, variable):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > end:
            return left
        time.sleep(LOOK_AGAIN_SECONDS)
    return []


def parent_of(pid: int) -> int:
    """0 when there is none, or the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    """The command line, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    except OSError:
        return "ended"
