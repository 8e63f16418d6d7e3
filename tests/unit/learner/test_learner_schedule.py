"""The learning rate, counted in Updates, by hand."""

from __future__ import annotations

import pytest

from services.common.config import parse
from services.common.errors import ConfigError
from services.learner.config import LearnerConfig, OptimizerConfig
from services.learner.schedule import learning_rate


def rates(count: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(config, update) for update in range(count)]


def test_constant():
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_the_minimum_at_the_last_update_and_stays():
    assert rates(7, schedule="linear", total_updates=5, minimum_ratio=0.2) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    )
    assert rates(6, schedule="linear", total_updates=6, warmup_updates=2, minimum_ratio=0.0) == pytest.approx(
        [0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0]
    )


def test_cosine():
    assert rates(5, schedule="cosine", total_updates=5, minimum_ratio=0.0) == pytest.approx(
        [1.0, 0.8535533906, 0.5, 0.1464466094, 0.0]
    )


def test_edges_are_legal():
    assert rates(2, schedule="linear", total_updates=2, warmup_updates=2) == pytest.approx([0.5, 1.0])
    assert rates(1, schedule="cosine", total_updates=1) == pytest.approx([1.0])
    assert rates(2, learning_rate=0.0, schedule="cosine", total_updates=2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_updates": 11, "total_updates": 10}, "warmup_updates = 11 is longer than the run, total_updates = 10"),
        ({"schedule": "linear"}, "set total_updates"),
        ({"learning_rate": -1e-6}, "greater than or equal to 0"),
        ({"betas": [0.9, 1.0]}, "less than 1"),
        ({"lerning_rate": 1e-6}, "did you mean 'learning_rate'"),
    ],
)
def test_what_cannot_work_is_refused_at_configuration(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse(LearnerConfig, {"optimizer": settings}, "test")
