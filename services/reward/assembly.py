"""From the settings to the scorers and the reference model."""

from __future__ import annotations

from pathlib import Path

from services.common.config import ProcessConfig
from services.reward.composite import CompositeScorer
from services.reward.config import CompositeScorer as CompositeSettings
from services.reward.config import RewardConfig
from services.reward.function_scorer import FunctionScorer
from services.reward.reference import Reference
from services.reward.reference_process import ReferenceProcess
from services.reward.reference_settings import settled
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


def make_reference(process: ProcessConfig[RewardConfig], log_folder: Path) -> Reference | None:
    """None without one in the settings. Raises ConfigError for a folder that cannot be a model."""
    if process.settings.reference is None:
        return None
    settings = settled(process.settings.reference, process.model, process.service)
    log = log_folder / f"{process.service.worker_id}-reference.log"
    return Reference(ReferenceProcess(settings, log), settings.micro_batch_tokens)
