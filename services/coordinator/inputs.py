"""What a run is made of before any worker is there: tokenizer and data sets. Faults in them show in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.tenant.v1 import tenant_pb2

from services.common.config import ModelConfig
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Dataset, load_dataset
from services.coordinator.text import Text

TRAINING = "train"

Notice = Callable[[str, str], None]
"""notice(level, message)"""


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and prompts of a run."""

    text: Text
    training: Dataset
    heldout: Dataset | None
    longest: int
    """Tokens of the longest sequence that may come up: prompt and answer, training and evaluation."""


def read_inputs(config: CoordinatorConfig, model: ModelConfig) -> Inputs:
    """Reads everything; blocks for as long as that takes. Raises ConfigError that lists what is wrong."""
    text = Text(Path(model.path))
    training = load_dataset(TRAINING, Path(config.data.path), config.data, text)
    rows = len(training.prompts)
    if rows < config.prompts_per_step:
        raise ConfigError(
            f"{config.data.path}: {rows} rows < prompts_per_step {config.prompts_per_step}; take 1 to {rows} prompts "
            "per step, or more rows"
        )
    longest = training.longest + config.sampling.max_tokens
    heldout = None
    if config.evaluation is not None:
        heldout = load_dataset(config.evaluation.name, Path(config.evaluation.path), config.data, text)
        longest = max(longest, heldout.longest + config.evaluation.max_tokens)
    return Inputs(text, training, heldout, longest)


def tell_surprises(inputs: Inputs, config: CoordinatorConfig, notice: Notice) -> None:
    """Says what is allowed and may still not be meant."""
    if config.algorithm.control != "none":
        notice(
            "warning", f"CONTROL EXPERIMENT {config.algorithm.control}: rewards are handed around; no learning is meant"
        )
    if not inputs.text.stop_token_ids:
        notice("warning", "the model folder names no end-of-sequence token: every answer takes max_tokens")
    if inputs.heldout is not None:
        seen = {prompt.token_ids for prompt in inputs.training.prompts}
        shared = [prompt.row for prompt in inputs.heldout.prompts if prompt.token_ids in seen]
        if shared:
            of = len(inputs.heldout.prompts)
            notice("warning", f"{len(shared)} of {of} evaluation prompts are trained on too, first row {shared[0]}")


def check_lengths(inputs: Inputs, states: dict[str, tenant_pb2.GetStateResponse]) -> None:
    """Raises ConfigError with the equation when a worker, by its own word, cannot take the longest sequence."""
    for worker_id, state in states.items():
        limit = state.max_sequence_tokens
        if limit and inputs.longest > limit:
            raise ConfigError(
                f"{worker_id}: longest prompt + max_tokens = {inputs.longest} tokens > its max_sequence_tokens "
                f"{limit}; lower max_tokens, or raise max_sequence_tokens as far as the model allows"
            )
