"""Hands the lines of metrics.jsonl to one sink, in a thread that nothing waits for.

    MetricsFile.write ▶ metrics.jsonl ▶ [thread: read on from the position ▶ Sink.write ▶ position + 1] ▶ the sink

The file is the queue: nothing is held in memory and nothing is dropped. A sink that fails is opened again after a
pause; one that hangs keeps its thread. What was not delivered when the run ended is said, and is delivered first when
the run is taken up again. The position is kept in <run folder>/sinks/<name>.position, so a line is delivered once,
or once more if the process was killed in the instant between.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.coordinator.config import SinkConfig
from services.coordinator.sinks import Origin, Sink, open_sink

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
STUCK_SECONDS = 30.0
"""So long with one line, and it is told."""
NO_NUMBERS = ("step", "time", "policy_version")

Open = Callable[[int | None], Sink]
"""Opens the sink; see services/coordinator/sinks/__init__.py about its argument."""
Tell = Callable[[str, str], None]
"""(level, message); called from any thread."""


class Delivery:
    """One sink of one run. `news` after each line that was written, `close` at the end."""

    def __init__(self, name: str, metrics: Path, positions: Path, open_sink: Open, tell: Tell) -> None:
        self._name = name
        self._metrics = metrics
        self._position_file = positions / f"{name}.position"
        self._open = open_sink
        self._tell = tell
        self._sink: Sink | None = None
        self._delivered = _read_position(self._position_file)
        # Of the file: bytes and lines that are behind us, and the step of the last of these.
        self._offset, self._lines, self._last_step = 0, 0, -1
        self._failures = 0
        self._told: set[str] = set()
        self._busy_since: float | None = None
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def news(self) -> None:
        """There is a new line. Returns at once."""
        self._news.set()
        since = self._busy_since
        if since is not None and time.monotonic() - since > STUCK_SECONDS:
            self._tell_once("stuck", f"has been at one line for {STUCK_SECONDS:.0f} s")

    def begin_close(self) -> None:
        """No line comes any more."""
        self._closing = True
        self._news.set()

    def end_close(self, seconds: float) -> None:
        """Waits so long at most, and says what was not delivered."""
        self._thread.join(max(0.0, seconds))
        left = _count_lines(self._metrics) - self._delivered
        if left > 0:
            self._tell(
                "warning",
                f"sink {self._name}: {left} line(s) of {self._metrics} were not delivered when the run ended; they are "
                "delivered first if it is taken up again",
            )
        elif self._thread.is_alive():
            self._tell("warning", f"sink {self._name}: did not close within {seconds:.0f} s; all lines were delivered")

    def _run(self) -> None:
        while True:
            self._news.clear()
            closing = self._closing
            try:
                self._deliver()
                if closing and self._sink is not None:
                    self._sink.close()
                self._failures = 0
            except Exception as error:
                self._failures += 1
                logger.warning("sink %s", self._name, exc_info=error)
                self._tell_once("failed", f"{type(error).__name__}: {error}".strip().splitlines()[0])
                self._forget_sink()
            if closing:
                return
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1))
            self._wait(pause if self._failures else None)

    def _wait(self, pause: float | None) -> None:
        """For news; after a failure for the pause, which only the end of the run cuts short."""
        end = None if pause is None else time.monotonic() + pause
        while True:
            self._news.wait(None if end is None else max(0.0, end - time.monotonic()))
            if end is None or self._closing or time.monotonic() >= end:
                return
            self._news.clear()
            if self._closing:  # said between the two lines above
                return

    def _deliver(self) -> None:
        """Every whole line that is there and was not delivered yet."""
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                step = int(json.loads(line)["step"])
                if self._lines >= self._delivered:
                    self._hand_over(step, line)
                    self._delivered = self._lines + 1
                    _write_position(self._position_file, self._delivered)
                self._offset, self._lines, self._last_step = self._offset + len(line), self._lines + 1, step

    def _hand_over(self, step: int, line: bytes) -> None:
        values = json.loads(line)
        numbers = {name: value for name, value in values.items() if value is not None and name not in NO_NUMBERS}
        self._busy_since = time.monotonic()
        if self._sink is None:
            self._sink = self._open(step if step != self._last_step else None)
        self._sink.write(step, numbers, values["time"])
        self._busy_since = None

    def _forget_sink(self) -> None:
        """The next try opens it anew."""
        sink, self._sink, self._busy_since = self._sink, None, None
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            logger.info("sink %s, closing it after a failure: %s", self._name, error)

    def _tell_once(self, kind: str, what: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(
                "warning",
                f"sink {self._name}: {what}; the run goes on, {self._metrics} has every number, and delivery is tried "
                "again",
            )


def start_deliveries(sinks: Sequence[SinkConfig], origin: Origin, metrics: Path, tell: Tell) -> list[Delivery]:
    """One for each sink that is configured."""
    return [
        Delivery(
            sink.type,
            metrics,
            origin.run_dir / "sinks",
            lambda from_step, sink=sink: open_sink(sink, origin, from_step),  # type: ignore[misc]
            tell,
        )
        for sink in sinks
    ]


def close_deliveries(deliveries: Sequence[Delivery], seconds: float) -> None:
    """All at once; returns after so many seconds, whatever they do."""
    end = time.monotonic() + seconds
    for delivery in deliveries:
        delivery.begin_close()
    for delivery in deliveries:
        delivery.end_close(end - time.monotonic())


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _read_position(path: Path) -> int:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _write_position(path: Path, delivered: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(f"{delivered}\n")
    os.replace(aside, path)
