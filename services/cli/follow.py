"""`antiphon watch`: follows a run from another terminal, by the files in its folder.

The command that runs it writes each event to events.jsonl at once; here the file is read as it grows, so any number may
watch, and nothing that a watcher does reaches the run. A run that was killed says nothing at its end: then it is over
when no process carries its id any more.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from antiphon.events.v1 import events_pb2
from google.protobuf import json_format

from services.cli.run_processes import find_processes
from services.cli.told import FAILED, INTERRUPTED, OK, STOPPED, NoRun
from services.cli.view import RunProgress, View, make_view
from services.common.errors import ConfigError

LOOK_AGAIN_SECONDS = 0.2
LIFE_SECONDS = 1.0  # between two looks at all processes of the machine
MANIFEST_SECONDS = 10.0  # a run that has just begun is writing it
ALONE_SECONDS = 3.0  # without a process of the run; then it is over
FIRST_SECONDS = 15.0  # the same before the first event, while nothing may have been started yet


def follow(run_dir: Path, *, as_json: bool) -> int:
    """Shows what was and what comes; answers how the run ended, as an exit code. Raises ConfigError for no run."""
    run_id = find_run(run_dir)
    lines = _Lines(run_dir, lambda: bool(find_processes(run_id)))
    try:
        return _print(lines) if as_json else _show(lines, run_dir, run_id)
    except KeyboardInterrupt:  # of watching, not of the run
        return INTERRUPTED
    except BrokenPipeError:  # whoever read it has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def find_run(run_dir: Path) -> str:
    """The run's id, by its manifest. Raises ConfigError that says what is there instead."""
    if not run_dir.is_dir():
        raise NoRun(f"{run_dir}: no such folder; expected the folder of a run, such as runs/first")
    manifest = run_dir / "manifest.json"
    end = time.monotonic() + MANIFEST_SECONDS
    while True:
        try:
            return str(json.loads(manifest.read_text())["run_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not (run_dir / "recipe.yaml").is_file():
                inside = sorted(path.parent.name for path in run_dir.glob("*/manifest.json"))
                hint = f"; runs in it: {', '.join(inside)}" if inside else ""
                raise NoRun(f"{run_dir}: no run, it has no manifest.json and recipe.yaml{hint}") from None
            if time.monotonic() > end:
                raise ConfigError(
                    f"{manifest}: expected an object with run_id ({error!r}); the run did not begin"
                ) from None
        time.sleep(LOOK_AGAIN_SECONDS)


class _Lines:
    """The lines of events.jsonl as they come."""

    def __init__(self, run_dir: Path, lives: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir / "events.jsonl"
        self._process_file = run_dir / "processes" / "coordinator-0.yaml"
        self._lives = lives
        self._clock = clock
        self.last: events_pb2.RunEvent | None = None

    def __iter__(self) -> Iterator[tuple[str, events_pb2.RunEvent] | None]:
        """Each whole line with its event, and None whenever there is no more for now, until the run is over."""
        rest, position, looked, seen_alive = b"", 0, -math.inf, self._clock()
        while True:
            read = self._read(position)
            position += len(read)
            *whole, rest = (rest + read).split(b"\n")
            for line in whole:
                if (event := _event(line)) is not None:
                    self.last = event
                    yield line.decode(), event
            if read:
                continue
            if self._ended():
                return
            now = self._clock()
            if now - looked >= LIFE_SECONDS:
                looked = now
                if self._lives():
                    seen_alive = now
                elif now - seen_alive > (ALONE_SECONDS if self.last is not None else FIRST_SECONDS):
                    return
            yield None
            time.sleep(LOOK_AGAIN_SECONDS)

    @property
    def outcome(self) -> str:
        """Of the run; empty where it did not say."""
        return self.last.run_ended.outcome if self.last is not None else ""

    def _read(self, position: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(position)
                return file.read(1 << 20)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _ended(self) -> bool:
        """The last event is the last of a run, which was not taken up since."""
        if self.last is None or self.last.WhichOneof("event") != "run_ended":
            return False
        try:
            return self._process_file.stat().st_mtime_ns <= self._path.stat().st_mtime_ns
        except OSError:
            return True


def _event(line: bytes) -> events_pb2.RunEvent | None:
    """None for a line that was torn when its writer was killed."""
    try:
        return json_format.Parse(line, events_pb2.RunEvent(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError):
        print(f"a line that is no event is left out: {line[:80]!r}", file=sys.stderr)
        return None


def _print(lines: _Lines) -> int:
    for item in lines:
        if item is not None:
            print(item[0], flush=True)
    return _code(lines.outcome)


def _show(lines: _Lines, run_dir: Path, run_id: str) -> int:
    now: list[float] = []  # of the event that is being told; else it is the wall's

    progress = RunProgress(lambda: now[0] if now else time.time())
    view: View = make_view(progress)
    try:
        view.line(f"run {run_id} in {run_dir}")
        for item in lines:
            if item is None:
                view.tick()
                continue
            now.append(item[1].time.ToMicroseconds() / 1e6)
            view.note(item[1])
            now.clear()
    finally:
        view.close()
    ended = progress.ended if lines.outcome else None
    if ended is None:
        view.line(
            f"the run is over and did not say how: no process of it is seen, by this user on this machine; "
            f"{run_dir / 'logs'} may tell"
        )
    else:
        view.line(f"run {ended.outcome}" + (f": {ended.reason}" if ended.reason else ""))
        if ended.export_path:
            view.line(f"policy {ended.policy.version} exported to {ended.export_path}")
    return _code(lines.outcome)


def _code(outcome: str) -> int:
    return {"finished": OK, "stopped": STOPPED}.get(outcome, FAILED)
