"""What a run is made of before any worker is there: tokenizer and data sets. Faults in them show in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.tenant.v1 import tenant_pb2

from services.common.config import ModelConfig
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Dataset, load_dataset
from services.coordinator.text import Text

LEFT_OUT_SHOWN = 3

Notice = Callable[[str, str], None]
"""notice(level, message)"""


@dataclass(frozen=True)
class Inputs:
    """Tokenizer and prompts of a run."""

    text: Text
    training: tuple[Dataset, ...]
    heldout: tuple[Dataset, ...]
    longest: int
    """Tokens of the longest sequence that may come up: prompt and answer, training and evaluation."""


def read_inputs(config: CoordinatorConfig, model: ModelConfig) -> Inputs:
    """Reads everything; blocks for as long as that takes. Raises ConfigError that lists what is wrong."""
    data = config.data
    text = Text(Path(model.path))
    training = tuple(load_dataset(source, data, text, weight=source.weight) for source in data.all_sources)
    _check_sizes(training, config.prompts_per_step)
    longest = max(dataset.longest for dataset in training) + config.sampling.max_tokens
    heldout = _read_heldout(config, text)
    return Inputs(text, training, heldout, max(longest, _longest_heldout(config, heldout)))


def read_heldout(config: CoordinatorConfig, model: ModelConfig) -> Inputs:
    """As `read_inputs`, without the prompts that are trained on."""
    text = Text(Path(model.path))
    heldout = _read_heldout(config, text)
    return Inputs(text, (), heldout, _longest_heldout(config, heldout))


def _read_heldout(config: CoordinatorConfig, text: Text) -> tuple[Dataset, ...]:
    if config.evaluation is None:
        return ()
    return tuple(load_dataset(source, config.data, text) for source in config.evaluation.all_sources(config.data))


def _longest_heldout(config: CoordinatorConfig, heldout: Sequence[Dataset]) -> int:
    if config.evaluation is None:
        return 0
    return max(dataset.longest for dataset in heldout) + config.evaluation.max_tokens


def _check_sizes(training: Sequence[Dataset], prompts_per_step: int) -> None:
    """Raises ConfigError when one Step would meet a row of a data set twice."""
    total = sum(dataset.weight for dataset in training)
    for dataset in training:
        rows, share = len(dataset.prompts), dataset.weight / total
        if rows < math.ceil(prompts_per_step * share):
            left = f" ({len(dataset.left_out)} more were left out)" if dataset.left_out else ""
            asked = f"prompts_per_step {prompts_per_step}" + (f" x its share {share:.3g}" if share < 1 else "")
            most = max(1, math.floor(rows / share))
            raise ConfigError(
                f"data set {dataset.name!r}: {rows} rows{left} < {asked}; take 1 to {most} prompts per step, or "
                "more rows"
            )


def tell_surprises(inputs: Inputs, config: CoordinatorConfig, notice: Notice) -> None:
    """Says how the data was understood, and what is allowed and may still not be meant."""
    if config.algorithm.control != "none":
        notice(
            "warning", f"CONTROL EXPERIMENT {config.algorithm.control}: rewards are handed around; no learning is meant"
        )
    if not inputs.text.stop_token_ids:
        notice("warning", "the model folder names no end-of-sequence token: every answer takes max_tokens")
    for dataset in (*inputs.training, *inputs.heldout):
        _tell_dataset(dataset, notice)
    for heldout in inputs.heldout:
        _tell_shared(heldout, inputs.training, notice)


def _tell_dataset(dataset: Dataset, notice: Notice) -> None:
    notice("info", f"data set {dataset.name!r}: {dataset.picked}")
    for remark in dataset.remarks:
        notice("warning", f"data set {dataset.name!r}: {remark}")
    if dataset.left_out:
        first = "; ".join(f"{one.place}: {one.reason}" for one in dataset.left_out[:LEFT_OUT_SHOWN])
        of = len(dataset.prompts) + len(dataset.left_out)
        notice(
            "warning",
            f"data set {dataset.name!r}: {len(dataset.left_out)} of {of} rows left out, all named in the log: {first}",
        )


def _tell_shared(heldout: Dataset, training: Sequence[Dataset], notice: Notice) -> None:
    """Equal token ids are equal prompts, however they were written."""
    seen = {prompt.token_ids: f"{d.name} row {prompt.row}" for d in training for prompt in d.prompts}
    shared = [(prompt.row, seen[prompt.token_ids]) for prompt in heldout.prompts if prompt.token_ids in seen]
    if shared:
        row, twin = shared[0]
        notice(
            "warning",
            f"data set {heldout.name!r}: {len(shared)} of {len(heldout.prompts)} evaluation prompts are trained on "
            f"too, first row {row}, which is {twin}",
        )


def check_lengths(inputs: Inputs, states: dict[str, tenant_pb2.GetStateResponse]) -> None:
    """Raises ConfigError with the equation when a worker, by its own word, cannot take the longest sequence."""
    for worker_id, state in states.items():
        limit = state.max_sequence_tokens
        if limit and inputs.longest > limit:
            raise ConfigError(
                f"{worker_id}: longest prompt + max_tokens = {inputs.longest} tokens > its max_sequence_tokens "
                f"{limit}; lower max_tokens, or raise max_sequence_tokens as far as the model allows"
            )
