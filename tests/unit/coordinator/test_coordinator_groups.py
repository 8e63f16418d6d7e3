"""Groups gather by id; the Batch is in canonical order whatever the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.digest import digest_messages
from services.common.errors import Conflict, Internal, Unavailable
from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.algorithms import make_estimator
from services.coordinator.algorithms.controls import shuffled_rewards
from services.coordinator.batch import Batch, build_batch, plan_updates
from services.coordinator.config import SamplingConfig
from services.coordinator.data import Prompt
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey, TrajectoryKey
from services.coordinator.metrics import batch_metrics, step_metrics

SAMPLES = 3
MAX_TOKENS = 8


def group(row: int, epoch: int = 0) -> Group:
    return Group(PromptKey("train", epoch, row), Prompt(row, (), "", (1, 2), "", "{}"), SAMPLES)


def trajectory(of: Group, sample: int, tokens: int = 2, **changes: Any) -> trajectory_pb2.Trajectory:
    made = trajectory_pb2.Trajectory(
        prompt_id=of.key.message(),
        sample_number=sample,
        token_ids=[1, 2, *range(10, 10 + tokens)],
        loss_mask=[False, False, *[True] * tokens],
        behavior_logprobs=[0.0, 0.0, *[-0.5] * tokens],
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        **changes,
    )
    made.version_spans.add(start=2, end=2 + tokens, policy_version=0)
    return made


def answer(of: Group, sample: int, value: float | None, scorer: str = "s@1") -> reward_pb2.ScoreResponse:
    made = reward_pb2.ScoreResponse(prompt_id=of.key.message(), sample_number=sample, scorer=scorer)
    if value is None:
        made.failure.kind = reward_pb2.FAILURE_KIND_DATA
    else:
        made.score.value = value
    return made


def finished(row: int, values: list[float | None], tokens: list[int] | None = None, epoch: int = 0) -> Group:
    made = group(row, epoch)
    order = list(range(SAMPLES))
    random.Random(row).shuffle(order)
    for sample in order:
        made.add_trajectory(trajectory(made, sample, (tokens or [2] * SAMPLES)[sample]))
    made.add_answers([answer(made, sample, values[sample]) for sample in reversed(order)])
    return made


def test_a_group_is_sampled_then_complete() -> None:
    made = group(4)
    states = []
    for sample in (2, 0, 1):
        states.append(made.state)
        made.add_trajectory(trajectory(made, sample))
    assert states == [GroupState.ADMITTED] * 3
    assert made.state is GroupState.SAMPLED
    assert [t.sample_number for t in made.trajectories] == [0, 1, 2]
    made.add_answers([answer(made, sample, float(sample)) for sample in (1, 2, 0)])
    assert (made.state, made.finished) == (GroupState.COMPLETE, True)
    assert made.rewards() == {TrajectoryKey(made.key, sample): float(sample) for sample in range(3)}


def test_one_score_makes_it_complete_and_none_failed() -> None:
    assert finished(0, [None, 1.0, None]).state is GroupState.COMPLETE
    failed = finished(0, [None, None, None])
    assert (failed.state, failed.finished, failed.rewards(), len(failed.failures)) == (GroupState.FAILED, True, {}, 3)


def test_a_trajectory_that_comes_twice_counts_once() -> None:
    made = group(0)
    made.add_trajectory(trajectory(made, 1))
    made.add_trajectory(trajectory(made, 1, tokens=5))
    assert made.sampled == 1
    assert len(made.trajectories[0].token_ids) == 4  # the first one stays


def test_what_does_not_belong_is_refused() -> None:
    made = group(0)
    with pytest.raises(Internal, match="train/0/1/0"):
        made.add_trajectory(trajectory(group(1), 0))
    with pytest.raises(Internal, match="train/0/0/3"):
        made.add_trajectory(trajectory(made, 3))
    with pytest.raises(Internal, match="cannot go from admitted to complete"):
        made.add_answers([answer(made, sample, 1.0) for sample in range(SAMPLES)])
    for sample in range(SAMPLES):
        made.add_trajectory(trajectory(made, sample))
    with pytest.raises(Internal, match="for each of 3 samples"):
        made.add_answers([answer(made, 0, 1.0), answer(made, 1, 1.0)])
    with pytest.raises(Internal, match="for each of 3 samples"):
        made.add_answers([answer(made, sample, 1.0) for sample in (0, 1, 1)])
    with pytest.raises(Conflict, match="scored by s@1 and s@2"):
        made.add_answers([answer(made, sample, 1.0, f"s@{1 + sample % 2}") for sample in range(SAMPLES)])
    made.add_answers([answer(made, sample, 1.0) for sample in range(SAMPLES)])
    with pytest.raises(Internal, match="cannot go from complete"):
        made.add_answers([answer(made, sample, 1.0) for sample in range(SAMPLES)])


def build(groups: list[Group], seed: int = 0, **algorithm: Any) -> Batch:
    config = AlgorithmConfig(**algorithm)
    sampling = SamplingConfig(temperature=0.7, max_tokens=MAX_TOKENS)
    return build_batch(1, groups, make_estimator(config), config, sampling=sampling, seed=seed)


def first_advantages(batch: Batch) -> dict[str, float]:
    return {
        row.trajectory_id: next(a for a, m in zip(row.advantages, row.loss_mask, strict=True) if m)
        for row in batch.trajectories
    }


def test_canonical_order_is_by_number_not_by_text_or_arrival() -> None:
    batch = build([finished(10, [1, 0, 0]), finished(9, [1, 0, 0], epoch=1), finished(9, [0, 1, 0])])
    assert [row.trajectory_id for row in batch.trajectories] == [
        *(f"train/0/9/{s}" for s in range(3)),
        *(f"train/0/10/{s}" for s in range(3)),
        *(f"train/1/9/{s}" for s in range(3)),
    ]
    assert batch.header.batch_digest == digest_messages(batch.trajectories)
    assert batch.header.trajectory_count == 9
    assert batch.header.policy.temperature == pytest.approx(0.7)
    (update,) = batch.header.updates
    assert (len(update.trajectory_ids), update.token_count) == (9, 18)


def test_rows_without_a_score_or_a_token_are_in_no_statistic() -> None:
    # Row 0: two survivors, 1 and 0: mean 1/2, std 0.707107. Row 1: one survivor. Row 2: no spread.
    groups = [
        finished(0, [1.0, 0.0, 50.0], tokens=[2, 3, 0]),
        finished(1, [None, 5.0, None]),
        finished(2, [2.0, 2.0, 2.0]),
    ]
    batch = build(groups)
    advantages = first_advantages(batch)
    assert advantages == pytest.approx(
        {
            "train/0/0/0": 0.707106,
            "train/0/0/1": -0.707106,
            "train/0/1/1": 0.0,
            "train/0/2/0": 0.0,
            "train/0/2/1": 0.0,
            "train/0/2/2": 0.0,
        },
        abs=1e-6,
    )
    assert (batch.without_tokens, batch.groups_without_signal) == (1, 2)
    assert batch.header.updates[0].token_count == 2 + 3 + 2 + 6  # groups without signal stay in N
    # By hand: scores 1, 0, 50, 5, 2, 2, 2; lengths 2, 3, 0, then six of 2.
    numbers = batch_metrics(groups, batch)
    assert numbers["reward"] == pytest.approx(62 / 7)
    assert numbers["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert numbers["completions/mean_length"] == pytest.approx(17 / 9)
    assert (numbers["score_failures"], numbers["trajectories_without_tokens"]) == (2.0, 1.0)
    assert (numbers["tokens"], numbers["tokens_trained"]) == (17.0, 13.0)
    changed = build([finished(0, [1.0, 0.0, -7.0], tokens=[2, 3, 0]), *groups[1:]])
    assert first_advantages(changed) == advantages


def test_numbers_of_a_step_are_sums_divided_once() -> None:
    def update(tokens: int, loss: float, **changes: Any) -> learner_pb2.UpdateMetrics:
        return learner_pb2.UpdateMetrics(tokens=tokens, loss=loss, entropy=2 * loss, gradient_norm=loss, **changes)

    result = learner_pb2.StepResult(
        updates=[
            update(4, 1.0, learning_rate=0.1, ratio_max=1.5),
            update(1, 2.0, learning_rate=0.2, ratio_max=3.0),
            update(5, 1e9, learning_rate=0.3, skipped=True),
        ],
        mismatch_kl_k3=0.25,
    )
    numbers = step_metrics(result)
    assert numbers["loss"] == pytest.approx((4 * 1.0 + 1 * 2.0) / 5)  # not the mean of the two means, 1.5
    assert numbers["entropy"] == pytest.approx(2.4)
    assert numbers["grad_norm"] == pytest.approx(1.5)
    assert (numbers["learning_rate"], numbers["ratio/max"], numbers["mismatch_kl_k3"]) == (0.3, 3.0, 0.25)
    assert (numbers["updates"], numbers["updates_skipped"]) == (2.0, 1.0)


def test_nothing_left_to_train_on_is_an_error() -> None:
    with pytest.raises(Unavailable, match="none of 2 groups"):
        build([finished(0, [None] * 3), finished(1, [1.0] * 3, tokens=[0, 0, 0])])


def test_the_control_hands_the_same_rewards_around() -> None:
    groups = [finished(row, [float(10 * row + s) for s in range(SAMPLES)]) for row in range(8)]
    real = build(groups)
    control = build(groups, 3, control="shuffled_rewards")
    assert [row.trajectory_id for row in control.trajectories] == [row.trajectory_id for row in real.trajectories]
    assert first_advantages(control) != first_advantages(real)
    assert first_advantages(control) == first_advantages(build(groups[::-1], 3, control="shuffled_rewards"))
    assert first_advantages(control) != first_advantages(build(groups, 4, control="shuffled_rewards"))


@given(st.dictionaries(st.integers(), st.floats(-5, 5), max_size=20), st.integers())
def test_shuffling_is_a_permutation(rewards: dict[int, float], seed: int) -> None:
    shuffled = shuffled_rewards(rewards, seed)
    assert list(shuffled) == list(rewards)
    assert sorted(shuffled.values()) == sorted(rewards.values())
    assert shuffled == shuffled_rewards(rewards, seed)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 8), st.integers(0, 99))
def test_a_plan_trains_every_row_once_an_epoch(lengths: list[int], epochs: int, mini_batches: int, seed: int) -> None:
    rows = [
        learner_pb2.TrainTrajectory(trajectory_id=f"t/{n}", loss_mask=[False, *[True] * length])
        for n, length in enumerate(lengths)
    ]
    updates = plan_updates(rows, epochs=epochs, mini_batches=mini_batches, seed=seed, step=1)
    parts = min(mini_batches, len(rows))
    assert len(updates) == epochs * parts
    for epoch in range(epochs):
        own = updates[epoch * parts : (epoch + 1) * parts]
        assert sorted(i for update in own for i in update.trajectory_ids) == sorted(row.trajectory_id for row in rows)
        sizes = [len(update.trajectory_ids) for update in own]
        assert max(sizes) - min(sizes) <= 1
        assert sum(update.token_count for update in own) == sum(lengths)
        for update in own:
            assert update.token_count == sum(lengths[int(i[2:])] for i in update.trajectory_ids)
    again = plan_updates(rows, epochs=epochs, mini_batches=mini_batches, seed=seed, step=1)
    assert updates == again


def test_answers_that_were_cut_and_long_ones() -> None:
    """By hand: lengths 2, 8, 7 of 8, the second cut; a buffer of 4 takes 0, 1, 0.75 of the rewards 1, 3, 2."""
    made = group(0)
    for sample, length in enumerate((2, 8, 7)):
        made.add_trajectory(trajectory(made, sample, length))
    made.trajectories[1].finish_reason = trajectory_pb2.FINISH_REASON_LENGTH
    made.add_answers([answer(made, sample, value) for sample, value in enumerate((1.0, 3.0, 2.0))])
    centred = {"advantage": {"type": "grpo", "norm_by_std": False}}

    def advantages(**algorithm: Any) -> list[float]:
        return list(first_advantages(build([made], **centred, **algorithm)).values())

    assert advantages() == pytest.approx([-1.0, 1.0, 0.0])
    assert advantages(overlong={"buffer": 4}) == pytest.approx([1 - 17 / 12, 2 - 17 / 12, 1.25 - 17 / 12])
    assert advantages(truncated="penalise", truncated_penalty=2.0) == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    assert advantages(truncated="mask") == pytest.approx([-0.5, 0.5])
    batch = build([made], truncated="mask", **centred)
    assert (batch.masked, batch.without_tokens, batch.header.updates[0].token_count) == (1, 0, 9)
    every = group(1)
    for sample in range(SAMPLES):
        every.add_trajectory(trajectory(every, sample))
        every.trajectories[sample].finish_reason = trajectory_pb2.FINISH_REASON_LENGTH
    every.add_answers([answer(every, sample, float(sample)) for sample in range(SAMPLES)])
    with pytest.raises(Unavailable, match="every scored answer of 1 groups was cut, and truncated is 'mask'"):
        build([every], truncated="mask")


def test_a_filter_looks_at_what_takes_part() -> None:
    """Scores 1, 1 and 0 of an answer that was cut: with truncated 'mask' nothing is left that differs."""

    def state(masks_cut: bool) -> GroupState:
        made = Group(PromptKey("train", 0, 0), group(0).prompt, SAMPLES, lambda s: max(s) > min(s), masks_cut=masks_cut)
        for sample in range(SAMPLES):
            made.add_trajectory(trajectory(made, sample))
        made.trajectories[2].finish_reason = trajectory_pb2.FINISH_REASON_LENGTH
        made.add_answers([answer(made, sample, value) for sample, value in enumerate((1.0, 1.0, 0.0))])
        return made.state

    assert state(False) is GroupState.COMPLETE
    assert state(True) is GroupState.FILTERED


def test_reference_log_probs_go_with_their_rows() -> None:
    groups = [finished(0, [1.0, 0.0, None]), finished(1, [1.0, 0.0, 2.0])]
    reference = {
        TrajectoryKey(g.key, s): [float(g.key.row), float(s), 0.0, 0.0] for g in groups for s in range(SAMPLES)
    }
    config = AlgorithmConfig(kl={"coefficient": 0.1})
    sampling = SamplingConfig(max_tokens=MAX_TOKENS)
    batch = build_batch(1, groups, make_estimator(config), config, sampling=sampling, seed=0, reference=reference)
    found = {row.trajectory_id: tuple(row.reference_logprobs)[:2] for row in batch.trajectories}
    assert found == {f"train/0/{r}/{s}": (r, s) for r, s in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))}
    assert batch.header.policy.kl.coefficient == pytest.approx(0.1)
