"""From scores to what the learner trains on. Pure: data in, data out. A new estimator is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.coordinator.algorithms import filters
from services.coordinator.algorithms.advantages import Estimate
from services.coordinator.algorithms.advantages.grpo import grpo
from services.coordinator.config import AlgorithmConfig, MeanFilter, SpreadFilter

Estimator = Callable[[Sequence[float | None]], Estimate]
"""Rewards of one group, None where a row takes no part, to the advantages of its rows."""


def _grpo(config: AlgorithmConfig) -> Estimator:
    return lambda rewards_G: grpo(rewards_G, norm_by_std=config.advantage.norm_by_std)


_ESTIMATORS: dict[str, Callable[[AlgorithmConfig], Estimator]] = {"grpo": _grpo}


def make_estimator(config: AlgorithmConfig) -> Estimator:
    """The advantage estimator that the configuration names."""
    return _ESTIMATORS[config.advantage.type](config)


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
