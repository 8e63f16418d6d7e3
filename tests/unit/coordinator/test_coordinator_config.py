"""Sizes that do not fit are refused with the equation; what is not written has the value of the page."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config import parse
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig


def config(**changes: Any) -> CoordinatorConfig:
    tree = {
        "steps": 5,
        "data": {"path": "rows.jsonl"},
        "sampling": {"max_tokens": 16},
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "scorer": "exact",
    }
    return parse(CoordinatorConfig, tree | changes, "recipe")


def test_defaults() -> None:
    read = config()
    assert (read.algorithm.loss.clip_low, read.algorithm.loss.clip_high) == (0.2, 0.2)
    assert read.algorithm.advantage.norm_by_std
    assert (read.sampling.temperature, read.failure_budget, read.schedule) == (1.0, 0.2, "sync")
    tolerances = read.self_check.logprob_tolerance_float32, read.self_check.logprob_tolerance_bfloat16
    assert (*tolerances, read.self_check.ratio_tolerance) == (1e-4, 0.06, 0.02)


def test_planned_updates() -> None:
    assert config(algorithm={"epochs": 2, "mini_batches": 3}).planned_updates == 5 * 2 * 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples_per_prompt": 1}, "take 2 or more"),
        ({"algorithm": {"mini_batches": 13}}, "3 x samples_per_prompt 4 = 12 trajectories"),
        ({"sampling": {"max_tokens": 16, "temperature": 0.0}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"algorithm": {"loss": {"clip_hi": 0.3}}}, "did you mean 'clip_high'"),
        ({"algorithm": {"control": "shuffled"}}, "algorithm.control"),
        ({"scheduler": "sync"}, "did you mean 'schedule'"),
        ({"steps": 0}, "steps"),
        ({"failure_budget": 1.5}, "failure_budget"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert complaint in str(caught.value)
