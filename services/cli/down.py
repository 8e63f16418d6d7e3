"""`antiphon down`: ends a run, or the services that `up` started, from any terminal of this machine.

The command that has the run is asked as Ctrl-C asks it: it stops after the work under way, writes a checkpoint, exports
and ends its processes. Where it was killed, what is left is found by the run's id, which every process carries.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.cli.run_lock import holder
from services.cli.run_processes import command_of, find_processes, kill_processes
from services.cli.subject import find_run_folder, weights_of_run
from services.cli.told import NoWeights, RunFailed

ASKED_SECONDS = 40.0
"""train and up need less than 30 from a signal to the end of the last process."""
KILL_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.1


@dataclass
class Ended:
    """What was done. Example: process 17 was asked, nothing had to be killed, the run is stopped."""

    run: str
    run_id: str
    asked: int | None = None
    """The command that had the run."""
    killed: dict[int, str] = field(default_factory=dict)
    """Process id to its command line: what nobody ended any more."""
    outcome: str = ""
    """As the run's last event says; empty where it says nothing."""
    weights: str | None = None
    """The newest checkpoint or exported policy."""
    to_go_on: str | None = None

    @property
    def something(self) -> bool:
        return self.asked is not None or bool(self.killed)


def down(run: Path, tell: Callable[[str], None]) -> Ended:
    """Raises NoRun; RunFailed when something cannot be ended."""
    run_dir = find_run_folder(run)
    run_id = str(json.loads((run_dir / "manifest.json").read_text())["run_id"])
    ended = Ended(str(run_dir), run_id)
    pid = _holder(run_dir)
    if pid is not None:
        ended.asked = pid
        tell(f"asking process {pid} to stop, {ASKED_SECONDS:.0f} s at most: {command_of(pid)}")
        _signal(pid)
        if not _over(run_dir, run_id, ASKED_SECONDS):
            tell(f"process {pid} has not ended; killing what is left")
            _signal(pid)  # the second kills at once
            if not _over(run_dir, run_id, KILL_SECONDS) and holder(run_dir) == pid:
                ended.killed[pid] = command_of(pid)
                os.kill(pid, signal.SIGKILL)
    if left := find_processes(run_id):
        ended.killed |= {one: command_of(one) for one in left}
        if still := kill_processes(run_id, KILL_SECONDS):
            raise RunFailed(f"{run_dir}: still alive after SIGKILL: {', '.join(map(str, still))}")
    _describe(ended, run_dir)
    return ended


def as_json(ended: Ended) -> str:
    return json.dumps({**asdict(ended), "something": ended.something}, ensure_ascii=False)


def as_text(ended: Ended) -> str:
    if not ended.something:
        return f"nothing is left of run {ended.run_id}" + _how_to_go_on(ended)
    lines = []
    if ended.asked is not None:
        lines.append(
            f"run {ended.run_id}: process {ended.asked} has ended" + (f"; {ended.outcome}" if ended.outcome else "")
        )
    lines += [f"killed {pid}: {command}" for pid, command in ended.killed.items()]
    if ended.weights is not None:
        lines.append(f"newest weights: {ended.weights}")
    return "\n".join(lines) + _how_to_go_on(ended)


def _how_to_go_on(ended: Ended) -> str:
    return f"\nto go on:\n  {ended.to_go_on}" if ended.to_go_on is not None else ""


def _holder(run_dir: Path) -> int | None:
    """Who has the run; waits the moment that it takes a command to say so."""
    end = time.monotonic() + 1.0
    while True:
        pid = holder(run_dir)
        if pid != 0:
            return pid
        if time.monotonic() > end:
            raise RunFailed(f"{run_dir}: a command has the run and does not say which; see who uses that folder")
        time.sleep(LOOK_AGAIN_SECONDS)


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise RunFailed(f"process {pid} is another user's; ask who started it") from None


def _over(run_dir: Path, run_id: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holder(run_dir) is None and not find_processes(run_id):
            return True
        time.sleep(LOOK_AGAIN_SECONDS)
    return False


def _describe(ended: Ended, run_dir: Path) -> None:
    said = _last_event(run_dir).get("runEnded", {})
    ended.outcome = str(said.get("outcome", ""))
    try:
        ended.weights = str(weights_of_run(run_dir).path)
    except NoWeights:
        pass
    if (run_dir / "run.db").is_file() and ended.outcome != "finished":
        ended.to_go_on = shlex.join(["antiphon", "resume", str(run_dir)])


def _last_event(run_dir: Path) -> dict[str, Any]:
    try:
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        last: dict[str, Any] = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return last
