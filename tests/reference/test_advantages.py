"""GRPO advantages against numpy in float64 and values worked out by hand; the cases are from user reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.algorithms import make_estimator
from services.coordinator.algorithms.advantages.grpo import grpo
from services.coordinator.algorithms.placement import discounted_sums, on_last_trainable
from services.coordinator.config import AlgorithmConfig, CoordinatorConfig, GrpoAdvantage


def reference(rewards: list[float | None], norm_by_std: bool) -> np.ndarray:
    """The formula of docs/math.md, written again: masked arrays, numpy's own two-pass variance."""
    values = np.ma.masked_invalid(np.array([np.nan if r is None else r for r in rewards], dtype=np.float64))
    present = values.compressed()
    if present.size < 2 or np.all(present == present[0]):
        return np.zeros(len(rewards))
    centred = values - present.mean()
    if norm_by_std:
        centred = centred / (np.std(present, ddof=1) + 1e-6)
    return np.clip(centred, -10.0, 10.0).filled(0.0)


rewards_G = st.lists(st.one_of(st.none(), st.floats(-1e4, 1e4, allow_nan=False)), min_size=1, max_size=16)


@given(rewards_G, st.booleans())
def test_equals_numpy(rewards: list[float | None], norm_by_std: bool) -> None:
    estimate = grpo(rewards, norm_by_std=norm_by_std)
    np.testing.assert_allclose(estimate.advantages_G, reference(rewards, norm_by_std), rtol=1e-9, atol=1e-9)


@given(rewards_G)
def test_is_finite_bounded_and_blind_to_rows_that_take_no_part(rewards: list[float | None]) -> None:
    estimate = grpo(rewards)
    assert all(math.isfinite(a) and abs(a) <= 10.0 for a in estimate.advantages_G)
    present = [reward for reward in rewards if reward is not None]
    if present:
        alone = iter(grpo(present).advantages_G)
        assert estimate.advantages_G == [0.0 if reward is None else next(alone) for reward in rewards]


def test_two_of_four_right() -> None:
    # mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3, std 0.577350; 0.5 / 0.577351 = 0.866024
    estimate = grpo([1.0, 0.0, 0.0, 1.0])
    assert estimate.advantages_G == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert estimate.signal


def test_without_the_division() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0], norm_by_std=False).advantages_G == [0.5, -0.5, -0.5, 0.5]
    # mean 100, so +-100 before the clip at 10
    assert grpo([0.0, 200.0], norm_by_std=False).advantages_G == [-10.0, 10.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.7, None, None], [None, None, 0.2], [None], []])
def test_a_survivor_alone_has_advantage_0_and_no_signal(rewards: list[float | None]) -> None:  # M01
    estimate = grpo(rewards)
    assert estimate.advantages_G == [0.0] * len(rewards)
    assert not estimate.signal


@pytest.mark.parametrize("samples", [0, 1])
def test_a_group_of_one_is_refused_at_configuration(samples: int) -> None:  # M01, M02
    with pytest.raises(ValueError, match="samples_per_prompt"):
        CoordinatorConfig(
            steps=1,
            data={"path": "x"},
            sampling={"max_tokens": 1},
            prompts_per_step=2,
            samples_per_prompt=samples,
            scorer="s",
        )


@pytest.mark.parametrize("value", [0.0, 0.1 + 0.2, 1e30, -5.5])
def test_equal_rewards_give_exactly_0_and_no_signal(value: float) -> None:
    estimate = grpo([value] * 7)
    assert estimate.advantages_G == [0.0] * 7
    assert not estimate.signal


def test_one_odd_among_equal_ones_does_not_explode() -> None:  # M04
    # [0, .95 x 7]: mean 0.83125; sum of squares 0.83125^2 + 7 x 0.11875^2 = 0.7896875; / 7 = 0.1128125; std 0.335876
    estimate = grpo([0.0] + [0.95] * 7)
    assert estimate.advantages_G == pytest.approx([-2.474866] + [0.353552] * 7, abs=1e-5)
    # In float32 and one pass the variance of the seven equal ones is off by 1e-7: nothing of it may be left here.
    rewards = [float(np.float32(r)) for r in [0.0] + [0.95] * 7]
    assert grpo(rewards).advantages_G == pytest.approx(estimate.advantages_G, abs=1e-6)
    # Far from zero the one-pass form loses every digit: variance of [1e8, 1e8 + 1] is 1/2.
    assert grpo([1e8, 1e8 + 1]).advantages_G == pytest.approx([-0.7071058, 0.7071058], abs=1e-6)


def test_a_row_without_trainable_tokens_moves_nothing() -> None:  # M05
    # rewards [1, 0, 50], the third fully masked: 1 and 0 are centred to +-0.5, whatever the third has
    assert grpo([1.0, 0.0, None], norm_by_std=False).advantages_G == [0.5, -0.5, 0.0]
    # with the division: std of [1, 0] is 0.707107
    assert grpo([1.0, 0.0, None]).advantages_G == pytest.approx([0.707106, -0.707106, 0.0], abs=1e-6)


def test_the_configuration_reaches_the_estimator() -> None:
    rewards = [3.0, 1.0, None]
    for norm_by_std in (True, False):
        estimator = make_estimator(AlgorithmConfig(advantage=GrpoAdvantage(norm_by_std=norm_by_std)))
        assert estimator(rewards) == grpo(rewards, norm_by_std=norm_by_std)


# Placement on tokens


def test_the_value_sits_on_the_last_trainable_token() -> None:  # M16
    # A response that ends before the row does, one that fills it, one whose middle is tool text.
    assert on_last_trainable(2.0, [False, True, True, True, False]).tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert on_last_trainable(2.0, [False, True, True]).tolist() == [0.0, 0.0, 2.0]
    assert on_last_trainable(2.0, [True, False, True, False]).tolist() == [0.0, 0.0, 2.0, 0.0]
    with pytest.raises(ValueError, match="no trainable token"):
        on_last_trainable(2.0, [False, False])


def test_sums_run_over_trainable_tokens_only() -> None:
    mask = [False, True, True, False, True, False]
    assert discounted_sums([9.0, 1.0, 2.0, 9.0, 4.0, 9.0], mask).tolist() == [0.0, 7.0, 6.0, 0.0, 4.0, 0.0]
    # gamma counts trainable tokens: 4, 2 + 4/2, 1 + (2 + 4/2)/2
    assert discounted_sums([9.0, 1.0, 2.0, 9.0, 4.0, 9.0], mask, 0.5).tolist() == [0.0, 3.0, 4.0, 0.0, 4.0, 0.0]


def test_masked_slots_may_hold_anything() -> None:  # M07
    nan, inf = math.nan, math.inf
    assert discounted_sums([nan, 1.0, inf, 2.0, -inf], [False, True, False, True, False]).tolist() == [
        0.0,
        3.0,
        0.0,
        2.0,
        0.0,
    ]


@given(st.floats(-10, 10), st.lists(st.booleans(), min_size=1, max_size=40).filter(any))
def test_every_trainable_token_gets_the_advantage_of_its_trajectory(value: float, mask: list[bool]) -> None:
    placed = discounted_sums(on_last_trainable(value, mask), mask)
    assert placed.tolist() == [value if trainable else 0.0 for trainable in mask]
