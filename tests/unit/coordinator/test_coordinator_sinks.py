"""Sinks of metrics: every line once, in order, over several lives; whatever a sink does, nobody waits for it.

cases.md U08, and the axis of steps of U10.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.common.config import parse
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig, SinkConfig, TensorBoardSink, TrackioSink, WandbSink
from services.coordinator.metrics import MetricsFile
from services.coordinator.sinks import Origin, delivery
from services.coordinator.sinks.delivery import close_deliveries, start_deliveries
from tests.simulated.sinks import SimulatedTrackio, SimulatedWandb

RUN = "demo-abc123"
W_AND_B = WandbSink(type="wandb", project="p")
SECONDS = 20.0


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimulatedWandb:
    return simulated(monkeypatch, SimulatedWandb())


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> SimulatedTrackio:
    return simulated(monkeypatch, SimulatedTrackio())


def simulated(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    name = library.__name__
    monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.delitem(sys.modules, f"services.coordinator.sinks.{name}", raising=False)
    monkeypatch.setattr(delivery, "FIRST_PAUSE_SECONDS", 0.01)
    return library


class Life:
    """One life of a run with sinks."""

    def __init__(self, folder: Path, *sinks: SinkConfig) -> None:
        self.told: list[str] = []
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        origin = Origin(RUN, folder, {"steps": 3})
        self.deliveries = start_deliveries(
            sinks, origin, self.metrics.path, lambda level, text: self.told.append(f"{level}: {text}")
        )

        def on_line() -> None:
            for one in self.deliveries:
                one.news()

        self.metrics.on_line = on_line

    def write(self, *steps: int, **numbers: float) -> None:
        for step in steps:
            self.metrics.write(step, step, numbers or {"loss": float(step)})

    def end(self, seconds: float = SECONDS) -> None:
        self.metrics.close()
        close_deliveries(self.deliveries, seconds)


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself shows: tag to (step, value)."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_one_curve_back_whatever_the_lives(tmp_path: Path) -> None:
    first = Life(tmp_path, TensorBoardSink(type="tensorboard"))
    first.write(0, **{"eval/held/score_mean": 0.25})
    first.write(1, 2)
    first.write(3, loss=float("nan"), reward=0.5)
    first.end()
    # Killed between the sink and the position: step 3 is there, and counts as not delivered.
    (tmp_path / "sinks" / "tensorboard.position").write_text("3\n")
    second = Life(tmp_path, TensorBoardSink(type="tensorboard"))
    second.write(4)
    second.end()
    assert first.told == second.told == []
    assert read_back(tmp_path) == {
        "loss": [(1, 1.0), (2, 2.0), (4, 4.0)],
        "reward": [(3, 0.5)],
        "eval/held/score_mean": [(0, 0.25)],
    }


def test_wandb_and_trackio_go_on_with_the_same_run(
    tmp_path: Path, wandb: SimulatedWandb, trackio: SimulatedTrackio
) -> None:
    sinks = (WandbSink(type="wandb", project="mine"), TrackioSink(type="trackio"))
    for steps in ((1, 2), (3,), ()):
        life = Life(tmp_path, *sinks)
        life.write(*steps)
        life.end()
        assert life.told == []
    assert wandb.runs == {RUN: {n: {"loss": float(n)} for n in (1, 2, 3)}}
    assert trackio.runs == {RUN: [(n, {"loss": float(n)}) for n in (1, 2, 3)]}
    assert wandb.opened[0] == {
        "project": "mine", "id": RUN, "name": RUN, "dir": str(tmp_path), "config": {"steps": 3}
    }  # fmt: skip
    assert len(wandb.opened) == wandb.finished == 2, "a life without a line opens nothing"


def test_a_step_and_its_evaluation_are_one_step(tmp_path: Path, wandb: SimulatedWandb) -> None:
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(1)
    life.write(1, score=0.5)
    life.end()
    assert wandb.runs[RUN] == {1: {"loss": 1.0, "score": 0.5}}


def test_a_sink_that_raises_is_told_once_and_gets_every_line_later(tmp_path: Path, wandb: SimulatedWandb) -> None:
    failures = iter([ConnectionError("no network"), ConnectionError("no network"), ValueError("bad")])

    def fail(step: int) -> None:
        if step == 2 and (error := next(failures, None)) is not None:
            raise error

    wandb.on_log = fail
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(1, 2, 3)
    until(lambda: 3 in wandb.runs.get(RUN, {}))
    life.end()
    assert list(wandb.runs[RUN]) == [1, 2, 3]
    (told,) = life.told
    assert told.startswith("warning: sink wandb: ConnectionError: no network; the run goes on")
    assert wandb.finished == len(wandb.opened), "each try is closed"


def test_what_was_not_delivered_at_the_end_is_said_and_comes_first_in_the_next_life(
    tmp_path: Path, wandb: SimulatedWandb
) -> None:
    def gone(step: int) -> None:
        raise OSError("gone")

    wandb.on_log = gone
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(1, 2)
    life.end()
    assert [text.split(";")[0] for text in life.told] == [
        "warning: sink wandb: OSError: gone",
        f"warning: sink wandb: 2 line(s) of {tmp_path / 'metrics.jsonl'} were not delivered when the run ended",
    ]
    wandb.on_log = lambda step: None
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(3)
    life.end()
    assert list(wandb.runs[RUN]) == [1, 2, 3] and life.told == []


def test_a_sink_that_hangs_is_waited_for_by_nobody(
    tmp_path: Path, wandb: SimulatedWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "STUCK_SECONDS", 0.05)
    free, reached = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        reached.set()
        free.wait(SECONDS)

    wandb.on_log = hang
    life = Life(tmp_path, WandbSink(type="wandb"))
    try:
        life.write(1)
        assert reached.wait(SECONDS)
        time.sleep(0.06)  # longer than STUCK_SECONDS: this is what is measured
        began = time.monotonic()
        life.write(2, 3)
        assert time.monotonic() - began < 0.5
        life.end(0.05)
        assert time.monotonic() - began < 2.0
        assert len(life.told) == 2
        assert "has been at one line for" in life.told[0] and "3 line(s)" in life.told[1]
    finally:
        free.set()


def test_a_slow_sink_keeps_the_order_and_loses_nothing(tmp_path: Path, wandb: SimulatedWandb) -> None:
    wandb.on_log = lambda step: time.sleep(0.01)
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(*range(20))
    life.end()
    assert list(wandb.runs[RUN]) == list(range(20)) and life.told == []


def test_a_line_that_was_not_written_to_its_end_is_not_delivered(tmp_path: Path, trackio: SimulatedTrackio) -> None:
    life = Life(tmp_path, TrackioSink(type="trackio"))
    life.write(1)
    with life.metrics.path.open("a") as file:
        file.write(json.dumps({"step": 2, "time": 1.0, "policy_version": 2, "loss": 2.0})[:20])
    life.end()
    assert trackio.runs == {RUN: [(1, {"loss": 1.0})]}


def test_a_library_that_cannot_be_imported_is_told_and_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "services.coordinator.sinks.wandb", raising=False)
    life = Life(tmp_path, WandbSink(type="wandb"))
    life.write(1)
    life.end()
    assert "import of wandb halted" in life.told[0] and "1 line(s)" in life.told[1]


@pytest.mark.parametrize(
    ("sinks", "found"),
    [
        (["tensorboard"], (TensorBoardSink(type="tensorboard"),)),
        (["trackio", {"type": "wandb", "project": "p"}], (TrackioSink(type="trackio"), W_AND_B)),
        (["mlflow"], "'tensorboard', 'wandb', 'trackio'"),
        (["wandb", {"type": "wandb", "project": "p"}], "sinks: Value error, wandb is there twice"),
        ([{"type": "tensorboard", "project": "p"}], "sinks.0.project: unknown key"),
        ([{"type": "wandb", "projct": "p"}], "did you mean 'project'"),
    ],
)  # fmt: skip
def test_sinks_in_a_recipe(sinks: list[Any], found: Any) -> None:
    tree = {
        "steps": 1, "data": {"path": "x.jsonl"}, "sampling": {"max_tokens": 4}, "prompts_per_step": 1,
        "samples_per_prompt": 2, "scorer": "s", "sinks": sinks,
    }  # fmt: skip
    if isinstance(found, str):
        with pytest.raises(ConfigError) as caught:
            parse(CoordinatorConfig, tree, "x")
        assert found in str(caught.value)
    else:
        read = parse(CoordinatorConfig, tree, "x")
        assert read.sinks == found
        assert parse(CoordinatorConfig, read.model_dump(mode="json"), "x") == read
