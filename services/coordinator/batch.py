"""The Batch: what one Step trains on, in canonical order, with its plan of Updates and its digest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages
from services.common.errors import Unavailable
from services.coordinator.algorithms import Estimator, controls, placement
from services.coordinator.config import AlgorithmConfig
from services.coordinator.groups import Group
from services.coordinator.identity import TrajectoryKey
from services.coordinator.trajectories import Trajectory, key_of, loss_mask, sampled_tokens

_LOSSES = {"ppo": learner_pb2.POLICY_LOSS_PPO}
_AGGREGATIONS = {"token": learner_pb2.AGGREGATION_TOKEN}


@dataclass(frozen=True)
class Batch:
    """What is sent to TrainStep, and what its making left out."""

    header: learner_pb2.StepHeader
    trajectories: list[learner_pb2.TrainTrajectory]
    advantages: dict[TrajectoryKey, float]
    """Of the rows that take part."""
    without_tokens: int
    """Scored rows with no trainable token: in no statistic and not sent."""
    groups_without_signal: int
    """Groups whose spread is zero, or that have one survivor: advantage 0."""

    @property
    def step(self) -> int:
        return self.header.step_id


def build_batch(
    step: int,
    groups: Sequence[Group],
    estimator: Estimator,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    seed: int,
) -> Batch:
    """The Batch of a Step from finished groups. Raises Unavailable when no row takes part.

    `seed` is the run's: the cut into mini-batches (and the control's shuffle) follow from it and the step.
    """
    rewards = {key: reward for group in groups for key, reward in group.rewards().items()}
    scored = sum(len(group.answers) - len(group.failures) for group in groups)
    if not rewards:
        raise Unavailable(f"step {step}: none of {len(groups)} groups has a scored trajectory with a trainable token")
    if algorithm.control == "shuffled_rewards":
        rewards = controls.shuffled_rewards(dict(sorted(rewards.items())), seed * 1_000_003 + step)
    advantages, without_signal = _advantages(groups, rewards, estimator)
    rows = [
        _row(key_of(trajectory), trajectory, advantages[key_of(trajectory)])
        for group in sorted(groups, key=lambda group: group.key)
        for trajectory in group.trajectories
        if key_of(trajectory) in advantages
    ]
    header = learner_pb2.StepHeader(
        step_id=step,
        batch_digest=digest_messages(rows),
        policy=objective(algorithm, temperature),
        updates=plan_updates(rows, epochs=algorithm.epochs, mini_batches=algorithm.mini_batches, seed=seed, step=step),
        trajectory_count=len(rows),
    )
    return Batch(header, rows, advantages, scored - len(rewards), without_signal)


def objective(algorithm: AlgorithmConfig, temperature: float) -> learner_pb2.PolicyObjective:
    """What the learner minimises; the temperature is that of the sampling."""
    return learner_pb2.PolicyObjective(
        loss=_LOSSES[algorithm.loss.type],
        clip_low=algorithm.loss.clip_low,
        clip_high=algorithm.loss.clip_high,
        aggregation=_AGGREGATIONS[algorithm.loss.aggregation],
        temperature=temperature,
    )


def plan_updates(
    rows: Sequence[learner_pb2.TrainTrajectory], *, epochs: int, mini_batches: int, seed: int, step: int
) -> list[learner_pb2.Update]:
    """The Updates of a Step: in each epoch every row once, cut into mini-batches whose sizes differ by at most one.

    One mini-batch keeps the canonical order; several are cut from an order shuffled anew in each epoch. N of an Update
    is the count of its own unmasked tokens. Fewer rows than mini-batches make fewer Updates: none is empty.
    """
    tokens = {row.trajectory_id: sampled_tokens(row) for row in rows}
    parts = min(mini_batches, len(rows))
    updates = []
    for epoch in range(epochs):
        ids = list(tokens)
        if parts > 1:
            random.Random(f"{seed}/{step}/{epoch}").shuffle(ids)
        for part in range(parts):
            chosen = ids[part * len(ids) // parts : (part + 1) * len(ids) // parts]
            updates.append(learner_pb2.Update(trajectory_ids=chosen, token_count=sum(tokens[i] for i in chosen)))
    return updates


def _advantages(
    groups: Sequence[Group], rewards: Mapping[TrajectoryKey, float], estimator: Estimator
) -> tuple[dict[TrajectoryKey, float], int]:
    advantages: dict[TrajectoryKey, float] = {}
    without_signal = 0
    for group in groups:
        keys = [TrajectoryKey(group.key, sample) for sample in range(group.samples)]
        estimate = estimator([rewards.get(key) for key in keys])
        without_signal += not estimate.signal
        advantages.update(
            {key: advantage for key, advantage in zip(keys, estimate.advantages_G, strict=True) if key in rewards}
        )
    return advantages, without_signal


def _row(key: TrajectoryKey, trajectory: Trajectory, advantage: float) -> learner_pb2.TrainTrajectory:
    mask_T = loss_mask(trajectory)
    advantages_T = placement.discounted_sums(placement.on_last_trainable(advantage, mask_T), mask_T)
    return learner_pb2.TrainTrajectory(
        trajectory_id=str(key),
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        version_spans=trajectory.version_spans,
        behavior_logprobs=trajectory.behavior_logprobs,
        advantages=advantages_T.tolist(),
    )
