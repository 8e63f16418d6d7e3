"""Where else the metrics of a run go: TensorBoard, Weights & Biases, trackio. A new one is a file and a case here.

metrics.jsonl has everything, always; a sink is handed its lines by a thread of its own (delivery.py), so whatever goes
wrong there the run goes on. Each library is imported only when its sink is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.coordinator.config import SinkConfig, TensorBoardSink, TrackioSink, WandbSink


class Sink(Protocol):
    """One place. Any method may raise anything, and may take its time."""

    def write(self, step: int, numbers: Mapping[str, float], at: float) -> None:
        """The numbers of a Step, or of an evaluation after it; `at` in Unix seconds. Kept by the sink on return."""
        ...

    def close(self) -> None:
        """Everything that was written is where it belongs."""
        ...


@dataclass(frozen=True)
class Origin:
    """Whose numbers they are."""

    run_id: str
    """The same in every life of a run: what a sink knows it by."""
    run_dir: Path
    settings: Mapping[str, Any]
    """What the run is configured with, for the reader of a curve."""


def open_sink(config: SinkConfig, origin: Origin, from_step: int | None) -> Sink:
    """Opens a sink, which goes on where the run was before, if it was.

    `from_step` is the Step of what comes next where nothing of that Step was delivered: what the sink may have of it,
    and of later ones, is no part of the run.
    """
    match config:
        case TensorBoardSink():
            from services.coordinator.sinks.tensorboard import TensorBoard

            return TensorBoard(origin, from_step)
        case WandbSink():
            from services.coordinator.sinks.wandb import WeightsAndBiases

            return WeightsAndBiases(config.project, origin)
        case TrackioSink():
            from services.coordinator.sinks.trackio import Trackio

            return Trackio(config.project, origin)
