"""From the settings to the scorers."""

from __future__ import annotations

from pathlib import Path

from services.reward.composite import CompositeScorer
from services.reward.config import CompositeScorer as CompositeSettings
from services.reward.config import RewardConfig
from services.reward.function_scorer import FunctionScorer
from services.reward.scorer import Scorer, ScorerSet


def make_scorers(settings: RewardConfig, log_folder: Path) -> ScorerSet:
    """Nothing is started yet. Raises ConfigError for a file that cannot be read."""
    simple: dict[str, FunctionScorer] = {}
    scorers: list[Scorer] = []
    for each in settings.scorers:
        if not isinstance(each, CompositeSettings):
            simple[each.name] = FunctionScorer(each, log_folder)
            scorers.append(simple[each.name])
    composite = [each for each in settings.scorers if isinstance(each, CompositeSettings)]
    return ScorerSet([*scorers, *(CompositeScorer(each, simple) for each in composite)])
