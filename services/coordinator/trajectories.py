"""What must hold of a trajectory that a rollout worker delivers. Checked on arrival, while the sender is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import Conflict, Internal
from services.coordinator.identity import PromptKey, TrajectoryKey

Trajectory = trajectory_pb2.Trajectory
Bools = npt.NDArray[np.bool_]
FINISHED = (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH)


def key_of(trajectory: Trajectory) -> TrajectoryKey:
    return TrajectoryKey(PromptKey.of(trajectory.prompt_id), trajectory.sample_number)


def loss_mask(trajectory: Trajectory | learner_pb2.TrainTrajectory) -> Bools:
    """[T], one per token: whether the policy sampled it. A copy: the message's own field is read item by item."""
    return np.asarray(trajectory.loss_mask, dtype=np.bool_)


def sampled_tokens(trajectory: Trajectory | learner_pb2.TrainTrajectory) -> int:
    """How many the policy sampled."""
    return int(np.count_nonzero(loss_mask(trajectory)))


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """The token ids that the policy sampled."""
    ids: list[int] = np.asarray(trajectory.token_ids, dtype=np.int64)[loss_mask(trajectory)].tolist()
    return ids


def check(trajectory: Trajectory, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
    """Raises Internal, naming worker, trajectory and what is wrong, unless it is a finished answer to the prompt."""
    length, prompt = len(trajectory.token_ids), len(prompt_token_ids)
    if len(trajectory.loss_mask) != length or len(trajectory.behavior_logprobs) != length:
        raise _wrong(
            trajectory,
            f"expected {length} loss mask entries and log-probabilities, one per token, got "
            f"{len(trajectory.loss_mask)} and {len(trajectory.behavior_logprobs)}",
        )
    mask_T = loss_mask(trajectory)
    if trajectory.token_ids[:prompt] != list(prompt_token_ids) or mask_T[:prompt].any():
        raise _wrong(trajectory, "expected the token ids of the prompt at its beginning, masked; it begins otherwise")
    if trajectory.finish_reason not in FINISHED:
        reason = trajectory_pb2.FinishReason.Name(trajectory.finish_reason)
        raise _wrong(trajectory, f"expected it to be finished by STOP or LENGTH, got {reason}")
    if length - prompt > max_tokens:
        raise _wrong(trajectory, f"expected at most {max_tokens} tokens after the prompt, got {length - prompt}")
    logprobs_T = np.asarray(trajectory.behavior_logprobs, dtype=np.float64)
    # Rounding may put a certain token above 0.
    wrong_T = mask_T & ~(np.isfinite(logprobs_T) & (logprobs_T <= 1e-3))
    if wrong_T.any():
        t = int(wrong_T.argmax())
        raise _wrong(
            trajectory, f"expected a finite log-probability of at most 0 at position {t}, got {float(logprobs_T[t])}"
        )
    _check_spans(trajectory, mask_T)


def require_version(trajectory: Trajectory, version: int) -> None:
    """Raises Conflict unless every token was sampled by this policy version: the strict on-policy assertion."""
    found = sorted({span.policy_version for span in trajectory.version_spans})
    if found != [version]:
        raise Conflict(
            f"{key_of(trajectory)} from {trajectory.worker_id}: expected every token to be sampled by policy version "
            f"{version}, got version(s) {', '.join(map(str, found)) or 'none'}; a publication did not reach this "
            "engine, and the sync schedule trains on policy only"
        )


def _check_spans(trajectory: Trajectory, mask_T: Bools) -> None:
    uncovered_T = mask_T.copy()
    end = 0
    for span in trajectory.version_spans:
        if not end <= span.start < span.end <= len(mask_T):
            raise _wrong(
                trajectory, f"expected version spans in order within its tokens, got [{span.start}, {span.end})"
            )
        uncovered_T[span.start : span.end] = False
        end = span.end
    if uncovered_T.any():
        missing = int(uncovered_T.argmax())
        raise _wrong(trajectory, f"expected version spans over every sampled token, position {missing} has none")


def _wrong(trajectory: Trajectory, what: str) -> Internal:
    error = Internal(f"{key_of(trajectory)} from {trajectory.worker_id}: {what}")
    error.worker_id = trajectory.worker_id
    return error
