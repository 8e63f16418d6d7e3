"""From scores to what the learner trains on. Pure: data in, data out. A new estimator is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.algorithms.advantages.grpo import grpo
from services.coordinator.algorithms.advantages.reinforce import reinforce
from services.coordinator.algorithms.advantages.rloo import rloo
from services.coordinator.algorithms.estimators import Estimator

centred = partial(grpo, norm_by_std=False)
"""R - mean of the group."""

ESTIMATORS: dict[str, Callable[[Any], Estimator]] = {
    "grpo": lambda options: Estimator(partial(grpo, norm_by_std=options.norm_by_std), compares=True),
    "dr_grpo": lambda options: Estimator(centred, compares=True),
    "rloo": lambda options: Estimator(rloo, compares=True),
    "reinforce": lambda options: Estimator(reinforce, compares=False, gamma=options.gamma, whitens=True),
    "reinforce_baseline": lambda options: Estimator(centred, compares=True, whitens=True),
}
"""By `algorithm.advantage.type`; each is made from that section."""


def make_estimator(config: AlgorithmConfig) -> Estimator:
    """The advantage estimator that the configuration names."""
    return ESTIMATORS[config.advantage.type](config.advantage)
