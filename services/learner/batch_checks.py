"""What must hold of a Step before anything is touched. Pure; reads messages, knows no tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages
from services.common.errors import InvalidRequest
from services.learner.objective_checks import check_needs, check_objective


def check_step(
    header: learner_pb2.StepHeader, trajectories: Sequence[learner_pb2.TrainTrajectory], max_sequence_tokens: int
) -> None:
    """Raises InvalidRequest that names the step and the trajectory, and says what was expected and what came."""
    step = f"step {header.step_id}"
    if len(trajectories) != header.trajectory_count:
        raise InvalidRequest(f"{step}: {header.trajectory_count} trajectories were announced, {len(trajectories)} came")
    digest = digest_messages(trajectories)
    if digest != header.batch_digest:
        raise InvalidRequest(
            f"{step}: the digest of what came is {digest.hex()[:16]}…, "
            f"the header has {header.batch_digest.hex()[:16] or 'none'}…; send the batch again"
        )
    check_objective(step, header)
    trained_tokens: dict[str, int] = {}
    for trajectory in trajectories:
        if trajectory.trajectory_id in trained_tokens:
            raise InvalidRequest(f"{step}: trajectory {trajectory.trajectory_id} came twice")
        _check_trajectory(step, trajectory, max_sequence_tokens)
        check_needs(step, header.policy, trajectory)
        trained_tokens[trajectory.trajectory_id] = sum(trajectory.loss_mask)
    _check_plan(step, header.updates, trained_tokens)


def _check_trajectory(step: str, trajectory: learner_pb2.TrainTrajectory, max_sequence_tokens: int) -> None:
    where = f"{step}, trajectory {trajectory.trajectory_id}"
    length = len(trajectory.token_ids)
    if not 0 < length <= max_sequence_tokens:
        raise InvalidRequest(f"{where}: {length} tokens; the model takes 1 to {max_sequence_tokens}")
    for name, optional in (
        ("loss_mask", False),
        ("advantages", False),
        ("behavior_logprobs", True),
        ("reference_logprobs", True),
        ("returns", True),
    ):
        count = len(getattr(trajectory, name))
        if count != length and not (optional and count == 0):
            raise InvalidRequest(f"{where}: {count} {name} for {length} tokens")
    if trajectory.loss_mask[0]:
        raise InvalidRequest(f"{where}: the first token is to be trained on, but nothing predicts it")
    for name in ("advantages", "behavior_logprobs", "reference_logprobs", "returns"):
        values = getattr(trajectory, name)
        for position, (value, trained) in enumerate(zip(values, trajectory.loss_mask, strict=False)):
            if trained and not math.isfinite(value):
                raise InvalidRequest(f"{where}: {name}[{position}] is {value}, and the token there is trained on")


def _check_plan(step: str, updates: Sequence[learner_pb2.Update], trained_tokens: dict[str, int]) -> None:
    if not updates:
        raise InvalidRequest(f"{step}: no Update is planned; expected at least one")
    planned: set[str] = set()
    for number, update in enumerate(updates, start=1):
        where = f"{step}, update {number} of {len(updates)}"
        ids = list(update.trajectory_ids)
        unknown = [i for i in ids if i not in trained_tokens]
        if unknown:
            raise InvalidRequest(f"{where}: trajectory {unknown[0]} is planned and did not come")
        if len(set(ids)) != len(ids):
            twice = next(i for i, times in Counter(ids).items() if times > 1)
            raise InvalidRequest(f"{where}: trajectory {twice} is planned twice")
        count = sum(trained_tokens[i] for i in ids)
        if count != update.token_count:
            raise InvalidRequest(
                f"{where}: N is {update.token_count}, its trajectories have {count} tokens to train on"
            )
        if count == 0:
            raise InvalidRequest(f"{where}: no token is trained on; leave the Update out")
        planned |= set(ids)
    left = sorted(trained_tokens.keys() - planned)
    if left:
        raise InvalidRequest(f"{step}: {len(left)} trajectories are in no Update, the first is {left[0]}")
