"""What the view says of a run's events."""

from __future__ import annotations

import io
import json
from typing import Any

from antiphon.events.v1 import events_pb2
from rich.console import Console

from services.cli.view import JsonView, LiveView, PlainView, RunProgress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def phase(name: str, step: int, waiting_for: str = "") -> events_pb2.RunEvent:
    change = events_pb2.PhaseChanged(phase=f"RUN_PHASE_{name}", step=step, waiting_for=waiting_for)
    return events_pb2.RunEvent(phase_changed=change)


def finished(step: int, planned: int, **metrics: float) -> events_pb2.RunEvent:
    named = [events_pb2.Metric(name=name, value=value) for name, value in metrics.items()]
    return events_pb2.RunEvent(step_finished=events_pb2.StepFinished(step=step, steps_planned=planned, metrics=named))


def play(progress: RunProgress, clock: Clock, *script: Any) -> list[str]:
    """Events, and between them seconds that pass."""
    lines: list[str] = []
    for item in script:
        if isinstance(item, float):
            clock.now += item
        else:
            lines += progress.note(item)
    return lines


def test_a_step_is_one_line_with_its_phases_and_what_is_left() -> None:
    clock = Clock()
    progress = RunProgress(clock)
    lines = play(
        progress, clock,
        phase("START", 0), 30.0, phase("EVALUATE", 0), 10.0,
        phase("GENERATE", 1), 5.0, phase("SCORE", 1), 1.0, phase("TRAIN", 1), 3.0, phase("PUBLISH", 1), 0.5,
        finished(1, 11, reward=0.25, loss=0.125, other=1.0),
    )  # fmt: skip
    assert lines == [
        "step 1/11  reward 0.25  loss 0.125  9.5 s (generate 5.0 score 1.0 train 3.0 publish 0.5)  left 1 min 35 s"
    ]
    (second,) = play(progress, clock, phase("GENERATE", 2), 2.0, phase("TRAIN", 2), 1.5, finished(2, 11, reward=0.5))
    assert second == "step 2/11  reward 0.5  3.5 s (generate 2.0 train 1.5)  left 58 s"  # 9 × (9.5 + 3.5) / 2


def test_what_is_waited_for_is_said_after_five_quiet_seconds() -> None:
    clock, out = Clock(), io.StringIO()
    progress = RunProgress(clock)
    view = PlainView(progress, out, clock)
    view.tick()
    clock.now += 4.9
    view.tick()
    assert out.getvalue() == ""
    clock.now += 0.2
    view.tick()
    view.tick()
    assert out.getvalue() == "… start, the services (5 s)\n"
    view.note(phase("GENERATE", 3, "64 answers, 900 s at most"))
    advance = events_pb2.PhaseProgress(phase=events_pb2.RUN_PHASE_GENERATE, step=3, done=12, of=64)
    view.note(events_pb2.RunEvent(phase_progress=advance))
    clock.now += 6.0
    view.tick()
    assert out.getvalue().splitlines()[1:] == ["… generate, step 3: 12/64, 64 answers, 900 s at most (6 s)"]


def test_results_and_notices_are_lines() -> None:
    clock = Clock()
    progress = RunProgress(clock)
    evaluated = events_pb2.Evaluated(dataset="heldout", policy_version=4, prompts=198, score_mean=0.5, failures=2)
    ended = events_pb2.RunEnded(outcome="finished", export_path="/x")
    lines = play(
        progress, clock,
        events_pb2.RunEvent(evaluated=evaluated),
        events_pb2.RunEvent(notice=events_pb2.Notice(level="warning", message="2 groups were left out")),
        events_pb2.RunEvent(run_ended=ended),
    )  # fmt: skip
    assert lines == [
        "heldout: mean score 0.5000 over 198 prompts with policy 4, 2 could not be scored",
        "warning: 2 groups were left out",
    ]
    assert progress.ended == ended and progress.evaluations == [evaluated]


def test_a_reader_that_left_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    view = PlainView(RunProgress(), Gone())
    view.line("hello")
    view.note(finished(1, 2))


def test_a_terminal_shows_lines_and_what_moves() -> None:
    clock, out = Clock(), io.StringIO()
    progress = RunProgress(clock)
    view = LiveView(progress, Console(file=out, force_terminal=True, width=120, markup=False, highlight=False))
    try:
        view.line("run [bold]story-1 in /runs/story")
        for event in (phase("GENERATE", 1), finished(1, 4, reward=0.25), phase("TRAIN", 2, "update 1/2")):
            view.note(event)
        view.tick()
        console = Console(file=io.StringIO(), width=120)
        console.print(view._render())
        shown = console.file.getvalue()  # type: ignore[attr-defined]
    finally:
        view.close()
    assert "run [bold]story-1 in /runs/story" in out.getvalue()
    assert "step 1/4  reward 0.25" in out.getvalue()
    assert "step 1/4" in shown and "train, step 2, update 1/2 (0 s)" in shown


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 59.4, 61, 3599, 3600, 7500)] == [
        "0 s", "59 s", "1 min 1 s", "59 min 59 s", "1 h 0 min", "2 h 5 min",
    ]  # fmt: skip


def test_what_one_wants_to_see_of_a_step() -> None:
    clock = Clock()
    progress = RunProgress(clock)
    assert progress.facts() == []
    play(
        progress, clock, phase("GENERATE", 1), 4.0,
        finished(
            1, 3, reward=0.5, reward_std=0.25, mismatch_kl_k3=0.0012, tokens_per_second=1234.5,
            **{"completions/mean_length": 20.25, "completions/min_length": 2, "completions/max_length": 64,
               "completions/clipped_ratio": 0.125},
        ),
        events_pb2.RunEvent(evaluated=events_pb2.Evaluated(dataset="held-out", policy_version=1, score_mean=0.75)),
        phase("GENERATE", 2),
        events_pb2.RunEvent(phase_progress=events_pb2.PhaseProgress(done=3, of=32)),
    )  # fmt: skip
    assert progress.facts() == [
        ("score", "0.5 (std 0.25)"),
        ("held-out", "0.7500 on held-out, policy 1"),
        ("KL", "not measured, there is no reference policy; 0.0012 from engine to trainer"),
        ("length", "20.2 tokens, 2 to 64, 12% cut"),
        ("age", "0, on policy"),
        ("tokens/s", "1,234 while sampling"),
        ("queue", "29 to be sampled"),
        ("left", "8 s for the Steps"),
    ]
    play(progress, clock, finished(2, 3, reward=0.5, kl=0.03125, **{"age/max": 2}))
    assert {("KL", "0.0312 to the reference policy"), ("age", "at most 2")} <= set(progress.facts())
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = LiveView(progress, console)
    view.close()
    with console.capture() as shown:
        console.print(view._render())
    assert "0.0312 to the reference policy" in shown.get() and "step 2/3" in shown.get()


def test_json_is_events_on_one_stream_and_lines_on_the_other() -> None:
    events, lines = io.StringIO(), io.StringIO()
    view = JsonView(RunProgress(), events, lines)
    view.line("run story in /runs/story")
    view.note(finished(1, 3, reward=0.5))
    view.tick()
    view.close()
    assert json.loads(lines.getvalue()) == {"line": "run story in /runs/story"}
    (event,) = map(json.loads, events.getvalue().splitlines())
    assert event["stepFinished"]["metrics"] == [{"name": "reward", "value": 0.5}]
