"""Advantages against numpy in float64 and values worked out by hand; the cases are from user reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.algorithms import make_estimator
from services.coordinator.algorithms.advantages import Baseline
from services.coordinator.algorithms.advantages.gae import gae
from services.coordinator.algorithms.advantages.grpo import grpo
from services.coordinator.algorithms.advantages.reinforce import reinforce
from services.coordinator.algorithms.advantages.rloo import rloo
from services.coordinator.algorithms.placement import discounted_sums, on_last_trainable
from services.coordinator.algorithms.shaping import overlong_penalty
from services.coordinator.algorithms.whitening import whiten
from services.coordinator.config import CoordinatorConfig


def reference(rewards: list[float | None], norm_by_std: bool) -> np.ndarray:
    """The formula of docs/math.md, written again: masked arrays, numpy's own two-pass variance."""
    values = np.ma.masked_invalid(np.array([np.nan if r is None else r for r in rewards], dtype=np.float64))
    present = values.compressed()
    if present.size < 2 or np.all(present == present[0]):
        return np.zeros(len(rewards))
    centred = values - present.mean()
    if norm_by_std:
        centred = centred / (np.std(present, ddof=1) + 1e-6)
    return np.asarray(centred.filled(0.0))


rewards_G = st.lists(st.one_of(st.none(), st.floats(-1e4, 1e4, allow_nan=False)), min_size=1, max_size=16)


@given(rewards_G, st.booleans())
def test_equals_numpy(rewards: list[float | None], norm_by_std: bool) -> None:
    estimate = grpo(rewards, norm_by_std=norm_by_std)
    np.testing.assert_allclose(estimate.advantages_G, reference(rewards, norm_by_std), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", [grpo, rloo, reinforce])
@given(rewards=rewards_G)
def test_is_finite_and_blind_to_rows_that_take_no_part(baseline: Baseline, rewards: list[float | None]) -> None:
    estimate = baseline(rewards)
    assert all(math.isfinite(a) for a in estimate.advantages_G)
    present = [reward for reward in rewards if reward is not None]
    if present:
        alone = iter(baseline(present).advantages_G)
        assert estimate.advantages_G == [0.0 if reward is None else next(alone) for reward in rewards]


def test_two_of_four_right() -> None:
    # mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3, std 0.577350; 0.5 / 0.577351 = 0.866024
    estimate = grpo([1.0, 0.0, 0.0, 1.0])
    assert estimate.advantages_G == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert estimate.signal


def test_without_the_division() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0], norm_by_std=False).advantages_G == [0.5, -0.5, -0.5, 0.5]
    assert grpo([0.0, 200.0], norm_by_std=False).advantages_G == [-100.0, 100.0]


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


@given(rewards=rewards_G)
def test_leave_one_out_is_the_mean_of_the_others(rewards: list[float | None]) -> None:
    expected = []
    present = [reward for reward in rewards if reward is not None]
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and r is not None]
        expected.append(0.0 if reward is None or not others else reward - np.mean(others))
    if len(set(present)) < 2:
        expected = [0.0] * len(rewards)
    np.testing.assert_allclose(rloo(rewards).advantages_G, expected, rtol=1e-9, atol=1e-9)


# Estimators over whole Batches


def plain_batch(kind: str, groups: list[list[float | None]], masks: list[list[list[bool]]]) -> list[list[list[float]]]:
    """docs/math.md, Order of events, in numpy: baseline, clip, last trainable token, sums, whitening. [G][i][T]"""
    found = []
    for rewards, group_masks in zip(groups, masks, strict=True):
        present = [r for r in rewards if r is not None]
        rows = []
        for i, (reward, mask) in enumerate(zip(rewards, group_masks, strict=True)):
            if reward is None:
                rows.append([math.nan] * len(mask))
                continue
            others = [r for j, r in enumerate(rewards) if r is not None and j != i]
            value = reward
            if kind != "reinforce":
                value = reward - np.mean(present) if others and len(set(present)) > 1 else 0.0
            if kind == "grpo" and value != 0.0:
                value /= np.std(present, ddof=1) + 1e-6
            if kind == "rloo" and value != 0.0:
                value = reward - np.mean(others)
            value = min(max(value, -10.0), 10.0)
            gamma, trained = (0.9 if kind == "reinforce" else 1.0), [t for t, m in enumerate(mask) if m]
            rows.append(
                [value * gamma ** (len(trained) - 1 - trained.index(t)) if m else 0.0 for t, m in enumerate(mask)]
            )
        found.append(rows)
    if kind in ("reinforce", "reinforce_baseline"):
        every = np.array([
            a
            for rows, group_masks in zip(found, masks, strict=True)
            for row, mask in zip(rows, group_masks, strict=True)
            for a, m in zip(row, mask, strict=True)
            if m and not math.isnan(a)
        ])  # fmt: skip
        mean, std = every.mean(), np.sqrt(every.var() + 1e-8)
        found = [
            [
                [(a - mean) / std if m else 0.0 for a, m in zip(row, mask, strict=True)]
                for row, mask in zip(rows, g, strict=True)
            ]
            for rows, g in zip(found, masks, strict=True)
        ]
    for rewards, rows in zip(groups, found, strict=True):
        if kind != "reinforce" and len({r for r in rewards if r is not None}) < 2:
            rows[:] = [[0.0] * len(row) for row in rows]  # rule 2: no spread, no signal, exactly 0
    return found


OPTIONS = {"grpo": {}, "dr_grpo": {}, "rloo": {}, "reinforce": {"gamma": 0.9}, "reinforce_baseline": {}}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_estimator_on_ragged_batches(kind: str, seed: int) -> None:
    """Ragged rows, tool text in masks, excluded rows, groups without spread or with one survivor, a huge reward."""
    dice = np.random.default_rng(seed)
    groups: list[list[float | None]] = [[float(r) for r in dice.normal(0, 1, 4)] for _ in range(5)]
    groups[0][1] = None
    groups[1] = [0.25] * 4
    groups[2] = [None, None, 0.5, None]
    groups[3][2] = 500.0
    masks = [[[False, *(dice.random(dice.integers(0, 6)) < 0.6).tolist(), True, False] for _ in g] for g in groups]
    config = AlgorithmConfig.model_validate({"advantage": {"type": kind, **OPTIONS[kind]}})
    keys = [[(g, i) for i in range(4)] for g in range(5)]
    rewards = {(g, i): r for g, group in enumerate(groups) for i, r in enumerate(group) if r is not None}
    by_key = {(g, i): np.array(masks[g][i]) for g, i in rewards}
    estimated = make_estimator(config)(keys, rewards, by_key)
    assert estimated.rows.keys() == rewards.keys()
    expected = plain_batch(kind, groups, masks)
    for (g, i), row in estimated.rows.items():
        np.testing.assert_allclose(row, expected[g][i], rtol=1e-9, atol=1e-9)
    assert estimated.without_signal == (0 if kind == "reinforce" else 2)
    mixed = make_estimator(config)(keys[::-1], dict(reversed(rewards.items())), by_key)
    for key, row in estimated.rows.items():
        np.testing.assert_array_equal(mixed.rows[key], row)  # bit by bit, in any order


def test_whitening_by_hand() -> None:
    """[1, 3 | 5]: mean 3, biased variance 8/3, scale 1.632993; what is masked is not read."""
    rows = [np.array([math.nan, 1.0, 3.0]), np.array([5.0, math.inf])]
    whitened = whiten(rows, [np.array([False, True, True]), np.array([True, False])])
    assert whitened[0] == pytest.approx([0.0, -1.224745, 0.0], abs=1e-6)
    assert whitened[1] == pytest.approx([1.224745, 0.0], abs=1e-6)
    (flat,) = whiten([np.array([2.0, 2.0])], [np.array([True, True])])
    assert flat.tolist() == [0.0, 0.0]
    (nothing,) = whiten([np.array([2.0])], [np.array([False])])
    assert nothing.tolist() == [0.0]


# Generalised advantages


def test_gae_by_hand() -> None:
    """Rewards 0, 1; values 0.5, 0.25; gamma 0.9, lambda 0.8, tool text between them.

    delta_2 = 1 - 0.25 = 0.75; delta_1 = 0.9 * 0.25 - 0.5 = -0.275; A_1 = -0.275 + 0.72 * 0.75 = 0.265
    """
    nan = math.nan
    advantages, returns = gae(
        [nan, 0.0, nan, 1.0, nan], [nan, 0.5, 9.0, 0.25, nan], [False, True, False, True, False], 0.9, 0.8
    )
    assert advantages == pytest.approx([0.0, 0.265, 0.0, 0.75, 0.0])
    assert returns == pytest.approx([0.0, 0.765, 0.0, 1.0, 0.0])


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_sum_over_future_deltas(seed: int) -> None:
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), written as a double loop over the trainable tokens alone."""
    dice = np.random.default_rng(seed)
    mask = (dice.random(12) < 0.6).tolist()
    rewards, values = dice.normal(size=12), dice.normal(size=12)
    trained = [t for t, m in enumerate(mask) if m]
    r, v = rewards[trained], np.append(values[trained], 0.0)
    delta = r + 0.97 * v[1:] - v[:-1]
    expected = [sum((0.97 * 0.9) ** k * delta[t + k] for k in range(len(trained) - t)) for t in range(len(trained))]
    advantages, returns = gae(rewards.tolist(), values.tolist(), mask, 0.97, 0.9)
    np.testing.assert_allclose([advantages[t] for t in trained], expected, atol=1e-12)
    np.testing.assert_allclose([returns[t] for t in trained], np.array(expected) + values[trained], atol=1e-12)
    flat = gae(rewards.tolist(), [0.0] * 12, mask, 1.0, 1.0)[0]
    np.testing.assert_allclose([flat[t] for t in trained], np.cumsum(r[::-1])[::-1], atol=1e-12)


# Shaping


def test_the_overlong_penalty_by_hand() -> None:
    found = [overlong_penalty(n, longest=100, buffer=20, factor=2.0) for n in (0, 80, 81, 90, 100, 150)]
    assert found == pytest.approx([0.0, 0.0, 0.1, 1.0, 2.0, 2.0])


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
