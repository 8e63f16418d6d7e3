"""The Batch: what one Step trains on, in canonical order, with its plan of Updates and its digest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages
from services.common.errors import Unavailable
from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.algorithms import controls, shaping
from services.coordinator.algorithms.estimators import Estimator
from services.coordinator.algorithms.objectives import objective
from services.coordinator.algorithms.placement import Floats
from services.coordinator.config import SamplingConfig
from services.coordinator.groups import Group
from services.coordinator.identity import TrajectoryKey
from services.coordinator.trajectories import Trajectory, key_of, loss_mask, sampled_tokens


@dataclass(frozen=True)
class Batch:
    """What is sent to TrainStep, and what its making left out."""

    header: learner_pb2.StepHeader
    trajectories: list[learner_pb2.TrainTrajectory]
    advantages: dict[TrajectoryKey, Floats]
    """Per token, of the rows that take part."""
    without_tokens: int
    """Scored rows with no trainable token: in no statistic and not sent."""
    masked: int
    """Scored rows that are left out because they were cut."""
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
    sampling: SamplingConfig,
    seed: int,
    reference: Mapping[TrajectoryKey, Sequence[float]] | None = None,
) -> Batch:
    """The Batch of a Step from finished groups. Raises Unavailable when no row takes part.

    `seed` is the run's: the cut into mini-batches (and the control's shuffle) follow from it and the step. `reference`
    are log-probs of every trajectory under the reference model, where the objective reads them.
    """
    trajectories = {key_of(trajectory): trajectory for group in groups for trajectory in group.trajectories}
    rewards = {key: reward for group in groups for key, reward in group.rewards().items()}
    scored = sum(len(group.answers) - len(group.failures) for group in groups)
    if not rewards:
        raise Unavailable(f"step {step}: none of {len(groups)} groups has a scored trajectory with a trainable token")
    if algorithm.control == "shuffled_rewards":
        rewards = controls.shuffled_rewards(dict(sorted(rewards.items())), seed * 1_000_003 + step)
    without_tokens = scored - len(rewards)
    rewards = shaping.shape(rewards, trajectories, algorithm, sampling.max_tokens)
    if not rewards:
        raise Unavailable(f"step {step}: every scored answer of {len(groups)} groups was cut, and truncated is 'mask'")
    siblings = [[TrajectoryKey(group.key, sample) for sample in range(group.samples)] for group in groups]
    advantages = estimator(siblings, rewards, {key: loss_mask(trajectories[key]) for key in rewards})
    rows = [
        _row(key, trajectories[key], advantages.rows[key], reference[key] if reference is not None else ())
        for key in sorted(rewards)
    ]
    header = learner_pb2.StepHeader(
        step_id=step,
        batch_digest=digest_messages(rows),
        policy=objective(algorithm, sampling),
        updates=plan_updates(rows, epochs=algorithm.epochs, mini_batches=algorithm.mini_batches, seed=seed, step=step),
        trajectory_count=len(rows),
    )
    return Batch(
        header, rows, advantages.rows, without_tokens, scored - without_tokens - len(rewards), advantages.without_signal
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


def _row(
    key: TrajectoryKey, trajectory: Trajectory, advantages_T: Floats, reference_T: Sequence[float]
) -> learner_pb2.TrainTrajectory:
    return learner_pb2.TrainTrajectory(
        trajectory_id=str(key),
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        version_spans=trajectory.version_spans,
        behavior_logprobs=trajectory.behavior_logprobs,
        reference_logprobs=reference_T,
        advantages=advantages_T.tolist(),
    )
