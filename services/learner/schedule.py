"""The learning rate, counted in Updates (docs/math.md, "Optimizer schedule")."""

from __future__ import annotations

import math

from services.learner.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """The rate of Update number `update` of the run, counted from 0; a skipped Update counts.

    It rises linearly over the warm-up: the first Update has 1/warmup_updates of the full rate, the last one all of it.
    From there a falling schedule reaches `minimum_ratio` of the rate at the last of `total_updates` and stays there.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant" or config.total_updates is None:
        return config.learning_rate
    falling = config.total_updates - config.warmup_updates
    done = min((update - config.warmup_updates) / max(falling - 1, 1), 1.0)
    share = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return config.learning_rate * (config.minimum_ratio + (1.0 - config.minimum_ratio) * share)
