"""The run as one sees it: state from the coordinator's events, shown live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from antiphon.events.v1 import events_pb2
from google.protobuf import json_format

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

QUIET_SECONDS = 5.0  # without a line; then one says what is waited for
SHOWN_METRICS = ("reward", "loss", "kl", "completions/mean_length", "age/max", "tokens_per_second", "score_failures")
QUEUES = {"generate": "to be sampled", "score": "to be scored", "evaluate": "held-out prompts to be answered"}
"""Phase to what is waiting while `of - done` is not 0."""
Clock = Callable[[], float]


class RunProgress:
    """What is known of the run so far. `lines` of an event are those worth keeping on the screen."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.phase = "start"
        self.step = 0
        self.steps_planned = 0
        self.steps_done = 0
        self.waiting_for = "the services"
        self.done = 0
        self.of = 0
        self.metrics: dict[str, float] = {}
        self.evaluations: list[events_pb2.Evaluated] = []
        self.ended: events_pb2.RunEnded | None = None
        self._phase_began = clock()
        self._step_began: float | None = None
        self._seconds: dict[str, float] = {}
        self._step_seconds: list[float] = []

    @property
    def phase_seconds(self) -> float:
        return self._clock() - self._phase_began

    @property
    def seconds_left(self) -> float | None:
        """The mean of the Steps so far, times those to come; None before the first."""
        if not self._step_seconds or not self.steps_planned:
            return None
        return sum(self._step_seconds) / len(self._step_seconds) * (self.steps_planned - self.steps_done)

    def note(self, event: events_pb2.RunEvent) -> list[str]:
        """Takes in one event; answers lines to print."""
        kind = event.WhichOneof("event")
        if kind == "phase_changed":
            self._enter(event.phase_changed)
        elif kind == "phase_progress":
            progress = event.phase_progress
            self.done, self.of = progress.done, progress.of
            self.waiting_for = progress.detail or self.waiting_for
        elif kind == "step_finished":
            return [self._finish_step(event.step_finished)]
        elif kind == "evaluated":
            self.evaluations.append(event.evaluated)
            return [describe_evaluation(event.evaluated)]
        elif kind == "notice":
            return [f"{event.notice.level}: {event.notice.message}"]
        elif kind == "run_ended":
            self.ended = event.run_ended
        return []

    def waiting(self) -> str:
        """What is going on, in one line."""
        where = self.phase if self.phase in ("start", "check", "export") else f"{self.phase}, step {self.step}"
        amount = f": {self.done}/{self.of}" if self.of else ""
        what = f", {self.waiting_for}" if self.waiting_for else ""
        return f"{where}{amount}{what} ({self.phase_seconds:.0f} s)"

    def facts(self) -> list[tuple[str, str]]:
        """What one wants to see of the newest Step, by name; before the first one only what is known already."""
        found: list[tuple[str, str]] = []
        number = self.metrics.get
        if (reward := number("reward")) is not None:
            spread = number("reward_std")
            found.append(("score", f"{reward:.4g}" + ("" if spread is None else f" (std {spread:.3g})")))
        if self.evaluations:
            last = self.evaluations[-1]
            found.append(("held-out", f"{last.score_mean:.4f} on {last.dataset}, policy {last.policy_version}"))
        if self.metrics:
            found.append(("KL", self._kl()))
        if (mean := number("completions/mean_length")) is not None:
            length = f"{mean:.1f} tokens"
            if (least := number("completions/min_length")) is not None:
                length += f", {least:.0f} to {number('completions/max_length', 0.0):.0f}"
            if (cut := number("completions/clipped_ratio")) is not None:
                length += f", {cut:.0%} cut"
            found.append(("length", length))
        if self.metrics:
            age = number("age/max")
            found.append(("age", "0, on policy" if age is None else f"at most {age:.0f}"))
        if (rate := number("tokens_per_second")) is not None:
            found.append(("tokens/s", f"{rate:,.0f} while sampling"))
        if self.phase in QUEUES and self.of:
            found.append(("queue", f"{self.of - self.done} {QUEUES[self.phase]}"))
        if (left := self.seconds_left) is not None:
            found.append(("left", f"{duration(left)} for the Steps"))
        return found

    def _kl(self) -> str:
        if "kl" in self.metrics:
            return f"{self.metrics['kl']:.3g} to the reference policy"
        mismatch = self.metrics.get("mismatch_kl_k3")
        beside = "" if mismatch is None else f"; {mismatch:.2g} from engine to trainer"
        return f"not measured, there is no reference policy{beside}"

    def _enter(self, change: events_pb2.PhaseChanged) -> None:
        now = self._clock()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._phase_began
        self.phase = events_pb2.RunPhase.Name(change.phase).removeprefix("RUN_PHASE_").lower()
        if self.phase == "generate" and (self._step_began is None or change.step != self.step):
            self._step_began, self._seconds = now, {}
        self.step, self.waiting_for = change.step, change.waiting_for
        self.done = self.of = 0
        self._phase_began = now

    def _finish_step(self, finished: events_pb2.StepFinished) -> str:
        now = self._clock()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._phase_began
        self._phase_began = now
        self.steps_done, self.steps_planned = finished.step, finished.steps_planned
        self.metrics = {metric.name: metric.value for metric in finished.metrics}
        took = now - (self._step_began if self._step_began is not None else now)
        self._step_seconds.append(took)
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items() if name != "start")
        self._seconds, self._step_began = {}, None
        numbers = "  ".join(f"{name} {self.metrics[name]:.4g}" for name in SHOWN_METRICS if name in self.metrics)
        left = self.seconds_left
        rest = f"  left {duration(left)}" if left else ""
        return f"step {finished.step}/{finished.steps_planned}  {numbers}  {took:.1f} s ({phases}){rest}"


class View(Protocol):
    """Where progress is shown."""

    def line(self, text: str) -> None:
        """Something to keep."""

    def note(self, event: events_pb2.RunEvent) -> None:
        """An event of the run."""

    def tick(self) -> None:
        """Called about once a second."""

    def close(self) -> None:
        """Nothing moves any more; lines may still come."""


class PlainView:
    """Lines, and one every few seconds while nothing else is said."""

    def __init__(self, progress: RunProgress, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._progress = progress
        self._stream = stream
        self._clock = clock
        self._last = clock()

    def line(self, text: str) -> None:
        self._last = self._clock()
        try:
            print(text, file=self._stream, flush=True)
        except (BrokenPipeError, ValueError):  # whoever read it has gone; the run goes on
            pass

    def note(self, event: events_pb2.RunEvent) -> None:
        for text in self._progress.note(event):
            self.line(text)

    def tick(self) -> None:
        if self._clock() - self._last >= QUIET_SECONDS:
            self.line(f"… {self._progress.waiting()}")

    def close(self) -> None:
        pass


class LiveView:
    """Lines above; below them what is known of the newest Step, and two bars that move: the Steps and the phase."""

    def __init__(self, progress: RunProgress, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._console = console or Console(highlight=False, markup=False)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def note(self, event: events_pb2.RunEvent) -> None:
        for text in self._progress.note(event):
            self.line(text)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress = self._progress
        table = Table.grid(padding=(0, 1))
        left = progress.seconds_left
        steps = f"step {progress.steps_done}/{progress.steps_planned or '?'}"
        bars: list[tuple[Any, Any, str]] = [
            (steps, ProgressBar(max(1, progress.steps_planned), progress.steps_done, width=30),
             "" if left is None else f"left {duration(left)}"),
            (progress.phase, ProgressBar(progress.of or None, progress.done, width=30, pulse=not progress.of),
             progress.waiting()),
        ]  # fmt: skip
        for bar in bars:
            table.add_row(*bar)
        facts = Table.grid(padding=(0, 2))
        for fact in progress.facts():
            facts.add_row(*fact)
        return Group(facts, table)


class JsonView:
    """Events as they come, a JSON object each; lines go to another stream as {"line": …}."""

    def __init__(self, progress: RunProgress, events: TextIO, lines: TextIO) -> None:
        self._progress = progress
        self._events = PlainView(progress, events)
        self._lines = PlainView(progress, lines)

    def line(self, text: str) -> None:
        self._lines.line(json.dumps({"line": text}, ensure_ascii=False))

    def note(self, event: events_pb2.RunEvent) -> None:
        self._progress.note(event)
        self._events.line(json_format.MessageToJson(event, indent=None))

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_view(progress: RunProgress, *, as_json: bool = False, stream: TextIO | None = None) -> View:
    """Live on a terminal, plain lines where output goes elsewhere; JSON lines on stdout, others on stderr."""
    stream = stream or sys.stdout
    if as_json:
        return JsonView(progress, stream, sys.stderr)
    if stream.isatty():
        from rich.console import Console

        return LiveView(progress, Console(file=stream, highlight=False, markup=False))
    return PlainView(progress, stream)


def describe_evaluation(evaluated: events_pb2.Evaluated) -> str:
    failures = f", {evaluated.failures} could not be scored" if evaluated.failures else ""
    return (
        f"{evaluated.dataset}: mean score {evaluated.score_mean:.4f} over {evaluated.prompts} prompts "
        f"with policy {evaluated.policy_version}{failures}"
    )


def duration(seconds: float) -> str:
    """Like 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
