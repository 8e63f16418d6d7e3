"""Weights & Biases: one run there for each run here, whatever its lives.

Where to and as whom is for its own variables (WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline, …).
"""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from services.coordinator.sinks import Origin


class WeightsAndBiases:
    """Its own process sends what is logged; a Step that is there already is left as it is."""

    def __init__(self, project: str, origin: Origin) -> None:
        self._run = wandb.init(
            project=project,
            id=origin.run_id,
            name=origin.run_id,
            dir=str(origin.run_dir),
            config=dict(origin.settings),
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(console="off"),
        )

    def write(self, step: int, numbers: Mapping[str, float], at: float) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
