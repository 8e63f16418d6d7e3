"""From scores to what the learner trains on. Pure: data in, data out. A new estimator is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from services.coordinator.algorithm_settings import AlgorithmConfig, MeanFilter, SpreadFilter
from services.coordinator.algorithms import filters
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


Keeps = Callable[[Sequence[float]], bool]
"""The scores of one group that take part, to whether it is trained."""


def make_filter(config: SpreadFilter | MeanFilter | None) -> Keeps | None:
    """The filter of groups that the configuration names; None where every group is trained."""
    match config:
        case SpreadFilter():
            return lambda scores_G: filters.by_spread(scores_G, tolerance=config.tolerance)
        case MeanFilter():
            return lambda scores_G: filters.by_mean(scores_G, above=config.above, below=config.below)
        case None:
            return None
