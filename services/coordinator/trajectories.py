"""What must hold of a trajectory that a rollout worker delivers. Checked on arrival, while the sender is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

from antiphon.types.v1 import trajectory_pb2

from services.common.errors import Conflict, Internal
from services.coordinator.identity import PromptKey, TrajectoryKey

Trajectory = trajectory_pb2.Trajectory
FINISHED = (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH)


def key_of(trajectory: Trajectory) -> TrajectoryKey:
    return TrajectoryKey(PromptKey.of(trajectory.prompt_id), trajectory.sample_number)


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """The token ids that the policy sampled."""
    return [i for i, sampled in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if sampled]


def check(trajectory: Trajectory, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
    """Raises Internal, naming worker, trajectory and what is wrong, unless it is a finished answer to the prompt."""
    length, prompt = len(trajectory.token_ids), len(prompt_token_ids)
    if len(trajectory.loss_mask) != length or len(trajectory.behavior_logprobs) != length:
        raise _wrong(
            trajectory,
            f"expected {length} loss mask entries and log-probabilities, one per token, got "
            f"{len(trajectory.loss_mask)} and {len(trajectory.behavior_logprobs)}",
        )
    if list(trajectory.token_ids[:prompt]) != list(prompt_token_ids) or any(trajectory.loss_mask[:prompt]):
        raise _wrong(trajectory, "expected the token ids of the prompt at its beginning, masked; it begins otherwise")
    if trajectory.finish_reason not in FINISHED:
        reason = trajectory_pb2.FinishReason.Name(trajectory.finish_reason)
        raise _wrong(trajectory, f"expected it to be finished by STOP or LENGTH, got {reason}")
    if length - prompt > max_tokens:
        raise _wrong(trajectory, f"expected at most {max_tokens} tokens after the prompt, got {length - prompt}")
    for t, sampled in enumerate(trajectory.loss_mask):
        logprob = trajectory.behavior_logprobs[t]
        if sampled and not (math.isfinite(logprob) and logprob <= 1e-3):  # rounding may put a certain token above 0
            raise _wrong(trajectory, f"expected a finite log-probability of at most 0 at position {t}, got {logprob}")
    _check_spans(trajectory)


def require_version(trajectory: Trajectory, version: int) -> None:
    """Raises Conflict unless every token was sampled by this policy version: the strict on-policy assertion."""
    found = sorted({span.policy_version for span in trajectory.version_spans})
    if found != [version]:
        raise Conflict(
            f"{key_of(trajectory)} from {trajectory.worker_id}: expected every token to be sampled by policy version "
            f"{version}, got version(s) {', '.join(map(str, found)) or 'none'}; a publication did not reach this "
            "engine, and the sync schedule trains on policy only"
        )


def _check_spans(trajectory: Trajectory) -> None:
    covered = [False] * len(trajectory.token_ids)
    end = 0
    for span in trajectory.version_spans:
        if not end <= span.start < span.end <= len(covered):
            raise _wrong(
                trajectory, f"expected version spans in order within its tokens, got [{span.start}, {span.end})"
            )
        covered[span.start : span.end] = [True] * (span.end - span.start)
        end = span.end
    missing = next((t for t, sampled in enumerate(trajectory.loss_mask) if sampled and not covered[t]), None)
    if missing is not None:
        raise _wrong(trajectory, f"expected version spans over every sampled token, position {missing} has none")


def _wrong(trajectory: Trajectory, what: str) -> Internal:
    error = Internal(f"{key_of(trajectory)} from {trajectory.worker_id}: {what}")
    error.worker_id = trajectory.worker_id
    return error
