"""Child processes that never outlive their parent (Linux).

The kernel's parent-death signal is used: it fires when the *thread* that made the child ends, so children are made from
a thread that lives as long as the process (the event loop's, in a service).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

# Every process of a run has it in its environment, its children's included.
RUN_ID_VARIABLE = "ANTIPHON_RUN_ID"


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent dies.

    `parent_pid` is the parent that is meant to be there: if it is already gone, this process ends at once. Without it
    only a parent that died before (pid 1 has taken its place) is noticed.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = os.getppid()
    if (parent_pid is not None and parent != parent_pid) or (parent_pid is None and parent == 1):
        os.kill(os.getpid(), signal.SIGKILL)


async def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None, cwd: Path | None = None
) -> asyncio.subprocess.Process:
    """Starts a child in a session of its own (a terminal's Ctrl-C does not reach it) that dies with this process.

    Standard output and error go to the end of `log`, or are inherited without one.
    """
    parent = os.getpid()

    def in_child() -> None:
        die_with_parent(parent)

    output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=in_child,
        )
    finally:
        if output is not None:
            os.close(output)


async def stop(process: asyncio.subprocess.Process, grace_seconds: float) -> int:
    """SIGTERM, then SIGKILL after the grace; returns the exit code (negative: the signal)."""
    if process.returncode is None:
        try:
            process.terminate()
            await asyncio.wait_for(process.wait(), grace_seconds)
        except ProcessLookupError:
            pass
        except TimeoutError:
            process.kill()
    return await process.wait()
