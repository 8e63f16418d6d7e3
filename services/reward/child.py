"""The process that runs user code: a guardian, and forked from it the worker whose main thread calls the function.

`python -m services.reward.child SOCKET PARENT_PID`, started by services/reward/sandbox.py. The guardian never runs
user code. Every process that the worker makes, however it hides, stays the guardian's to kill (it is their subreaper).
It does so when the worker ends, when it is told to (SIGTERM) and when the service dies (SIGTERM from the kernel).

Frames on the socket (services/common/framing.py) are JSON. The first says what to load:

    {"program": {"file": {source, path, function, arguments}} or {"builtin": settings}, "whole_groups", limits…}
    → {"ready": true, "wants": names, "not_enforced": words} or {"refused": why}

Each one after it is a call, and is answered with an outcome per candidate ("last": this worker shall be replaced):

    {"id", "given": by name, "columns": by name, "count": candidates}
    → {"id", "outcomes": [{"score", "parts"} or {"reason", "message"}, …], "last": bool}
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from services.common.framing import receive_frame, send_frame
from services.common.processes import die_with_parent
from services.reward.confinement import confine
from services.reward.functions import BadValue, Caller, CannotLoad, explain, load, understand, understand_group
from services.reward.signature import signature_of

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 5.0
MESSAGE_LIMIT = 4000  # characters
FENCE_HINT = "(the sandbox lets no new process and no network through; see allow_processes, allow_network)"

Frame = dict[str, Any]


def main() -> NoReturn:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    if os.getppid() != parent:
        os._exit(1)
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        die_with_parent(guardian)
        _work(descriptor)
    for inherited in (descriptor, 1, 2):  # their other ends shall see the end of the worker
        os.close(inherited)
    _guard(worker)


def _guard(worker: int) -> NoReturn:
    """Waits for the worker's end or the order to end it; leaves no process behind and ends as the worker did."""
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            _kill_descendants()
            os._exit(0)
        status = _reap(worker)
        if status is not None:
            _kill_descendants()
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                if number != signal.SIGKILL:
                    signal.signal(number, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
                os.kill(os.getpid(), number)
            os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _reap(worker: int) -> int | None:
    """Reaps what has ended; the worker's wait status once it has."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = status


def _kill_descendants() -> None:
    """Kills child after child: the grandchildren of a dead one become children."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.01)


def _children() -> list[int]:
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without that file
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if parent == me:
                    found.append(int(entry.name))
        return found


def _work(descriptor: int) -> NoReturn:
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    start = _receive(channel)
    if start is None:
        os._exit(0)
    missing = confine(
        start["memory_mib"], allow_network=start["allow_network"], allow_processes=start["allow_processes"]
    )
    fenced = not (start["allow_network"] and start["allow_processes"])
    try:
        call = _load(start["program"], whole_groups=start["whole_groups"])
    except CannotLoad as error:
        _flush()
        _send(channel, {"refused": _shortened(str(error))})
        os._exit(0)
    _flush()
    _send(channel, {"ready": True, "wants": call.wants, "not_enforced": missing})
    while (task := _receive(channel)) is not None:
        _send(channel, {"id": task["id"], **_perform(call, task, whole_groups=start["whole_groups"], fenced=fenced)})
    os._exit(0)


def _load(program: Frame, *, whole_groups: bool) -> Caller:
    """Raises CannotLoad."""
    if "file" in program:
        file = program["file"]
        function = load(file["source"], file["path"], file["function"])
        return Caller(function, file["arguments"], signature_of(whole_groups=whole_groups))
    from services.reward.builtin import registry

    try:
        return Caller(registry.make(program["builtin"]))
    except Exception as error:
        raise CannotLoad(explain(error)) from None


def _perform(call: Caller, task: Frame, *, whole_groups: bool, fenced: bool) -> Frame:
    """One call: an outcome for each of its candidates."""
    count = task["count"]
    try:
        answer = call(task["given"], task["columns"])
        if not whole_groups:
            return {"outcomes": [_scored(*understand(answer))]}
        understood = understand_group(answer, count, call.name)
        return {"outcomes": [_failed(u) if isinstance(u, BadValue) else _scored(*u) for u in understood]}
    except BadValue as error:
        return {"outcomes": [_failed(error)] * count}
    except BaseException as error:
        message = explain(error)
        if fenced and isinstance(error, PermissionError | socket.gaierror):
            message += "\n" + FENCE_HINT
        outcome = {"reason": "exception", "message": _shortened(message)}
        return {"outcomes": [outcome] * count, "last": isinstance(error, MemoryError)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a forgotten alarm shall not hit the next call
        _flush()


def _scored(score: float, parts: dict[str, float]) -> Frame:
    return {"score": score, "parts": parts}


def _failed(error: BadValue) -> Frame:
    return {"reason": error.reason, "message": _shortened(str(error))}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the user's code replaced or closed it
            pass


def _shortened(message: str) -> str:
    half = MESSAGE_LIMIT // 2
    return message if len(message) <= MESSAGE_LIMIT else f"{message[:half]}\n…\n{message[-half:]}"


def _send(channel: socket.socket, frame: Frame) -> None:
    send_frame(channel, json.dumps(frame).encode())


def _receive(channel: socket.socket) -> Frame | None:
    """The next frame; None when the service closed its end."""
    data = receive_frame(channel)
    return json.loads(data) if data else None


if __name__ == "__main__":
    main()
