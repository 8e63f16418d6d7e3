"""Child processes that never outlive their parent (Linux).

The kernel's parent-death signal is used: it fires when the *thread* that made the child ends, so children are made from
a thread that lives as long as the process (the event loop's, in a service).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from services.common.errors import Expired

logger = logging.getLogger(__name__)

KILL_SECONDS = 10.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

# Every process of a run has it in its environment, its children's included.
RUN_ID_VARIABLE = "ANTIPHON_RUN_ID"
# Every process of one life of a worker has it.
INSTANCE_ID_VARIABLE = "ANTIPHON_INSTANCE_ID"


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent (the thread that made it) ends.

    `parent_pid` is the parent that is meant to be there: if it is already gone, this process ends at once. Without it a
    child made by multiprocessing knows its parent; any other cannot tell whether the death came before this call (a
    parent with pid 1 is normal in a container). The kernel forgets the request at fork: each generation asks anew.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is None and (parent := multiprocessing.parent_process()) is not None:
        parent_pid = parent.pid
    if parent_pid is not None and os.getppid() != parent_pid:
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
    """SIGTERM, then SIGKILL after the grace; returns the exit code (negative: the signal).

    Raises Expired when even SIGKILL does not end it (it hangs in the kernel).
    """
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
        if process.returncode is None:
            # Not process.terminate(): it polls first, and thereby takes the exit code away from asyncio's watcher.
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        try:
            async with asyncio.timeout(seconds):
                return await process.wait()
        except TimeoutError:
            logger.warning("process %d did not end within %.1f s of %s", process.pid, seconds, number.name)
    raise Expired(f"process {process.pid} did not end within {KILL_SECONDS:.0f} s of SIGKILL")


def how_it_ended(code: int) -> str:
    """An exit code (negative: the signal) in words that follow on the name of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL:
        return "was killed by SIGKILL (by somebody, or by the kernel because memory ran out)"
    return f"was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Like SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"signal {number}"
