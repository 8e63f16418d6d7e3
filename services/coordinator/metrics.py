"""The numbers of a Step, by the names people know from TRL, and the local file that always gets them.

Each mean is one sum over one count of the whole Batch or Step; nothing is a mean of means. Raw scores and advantages
keep their own names.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import trajectory_pb2

from services.coordinator.batch import Batch
from services.coordinator.groups import Group, GroupState
from services.coordinator.trajectories import sampled_tokens


class MetricsFile:
    """run_dir/metrics.jsonl: one object per line, appended and flushed; then `on_line` is called, if it is set."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.steps = _steps_in(path)
        """Those whose lines an earlier life of the run wrote."""
        self._file = path.open("a", encoding="utf-8")
        self.on_line: Callable[[], None] = lambda: None

    def write(self, step: int, policy_version: int, numbers: Mapping[str, float]) -> None:
        """A line; a number that is not finite becomes null, since JSON has no other word for it."""
        line: dict[str, float | None] = {"step": step, "time": time.time(), "policy_version": policy_version}
        line.update({name: value if math.isfinite(value) else None for name, value in numbers.items()})
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self.on_line()

    def close(self) -> None:
        self._file.close()


def _steps_in(path: Path) -> set[int]:
    """The Steps that have a line of their training; a last line that was cut by a kill is taken away."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return set()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"] for line in lines if "loss" in line}


def batch_metrics(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """What the groups of a Step were like, as sampled and scored; with a filter, before it took any out.

    reward, reward_std: over every scored trajectory (std unbiased). frac_reward_zero_std: share of groups whose raw
    scores are all equal. completions/*: over every sampled trajectory, lengths in sampled tokens, cut ones included.
    """
    scores = [a.score.value for group in groups for a in group.answers if a.WhichOneof("outcome") == "score"]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [sampled_tokens(trajectory) for trajectory in trajectories]
    cut = sum(trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH for trajectory in trajectories)
    advantages = list(batch.advantages.values())  # 0 where they are not trained
    trained = sum(map(sampled_tokens, batch.trajectories))
    numbers = {
        "reward": _mean(scores),
        "reward_std": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "frac_reward_zero_std": sum(_all_equal(group) for group in groups) / len(groups),
        "groups_without_signal": float(batch.groups_without_signal),
        "advantages/mean": math.fsum(float(row.sum()) for row in advantages) / trained,
        "advantages/abs_max": max(float(abs(row).max()) for row in advantages),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": cut / len(trajectories),
        "trajectories": float(len(trajectories)),
        "trajectories_trained": float(len(batch.trajectories)),
        "trajectories_without_tokens": float(batch.without_tokens),
        "trajectories_masked": float(batch.masked),
        "score_failures": float(sum(len(group.failures) for group in groups)),
        "tokens": float(sum(lengths)),
        "tokens_trained": float(trained),
    }
    return numbers | _part_means(groups)


def filter_metrics(groups: Sequence[Group], kept: Sequence[Group]) -> dict[str, float]:
    """What a filter took out of the groups that were sampled for a Step; those without any score are not its doing."""
    filtered = sum(group.state is GroupState.FILTERED for group in groups)
    return {
        "filter/prompts_sampled": float(len(groups)),
        "filter/filtered_share": filtered / len(groups),
        "filter/groups_trained": float(len(kept)),
    }


def step_metrics(result: learner_pb2.StepResult) -> dict[str, float]:
    """What the learner saw: sums over the tokens of all Updates that were applied, divided once; norms per Update."""
    applied = [update for update in result.updates if not update.skipped]
    tokens = sum(update.tokens for update in applied)

    def per_token(values: Sequence[float]) -> float:
        total = math.fsum(value * update.tokens for value, update in zip(values, applied, strict=True))
        return total / tokens if tokens else math.nan

    return {
        "loss": per_token([update.loss for update in applied]),
        "grad_norm": _mean([update.gradient_norm for update in applied]),
        "learning_rate": result.updates[-1].learning_rate if result.updates else math.nan,
        "entropy": per_token([update.entropy for update in applied]),
        "clip_ratio": per_token([update.clip_fraction for update in applied]),
        "ratio/mean": per_token([update.ratio_mean for update in applied]),
        "ratio/max": max((update.ratio_max for update in applied), default=math.nan),
        **_correction_metrics(applied, per_token),
        "updates": float(len(applied)),
        "updates_skipped": float(len(result.updates) - len(applied)),
        "mismatch_kl_k3": result.mismatch_kl_k3,
        "mismatch_logprob_difference": result.behavior_difference,
        "mismatch_ratio": result.behavior_ratio,
        "time/train_ranks": result.seconds,
    }


def _correction_metrics(
    applied: Sequence[learner_pb2.UpdateMetrics], per_token: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """What a correction and a KL loss saw; nothing where there is none."""
    numbers: dict[str, float] = {}
    if any(update.correction_max for update in applied):
        numbers |= {
            "correction/mean": per_token([update.correction_mean for update in applied]),
            "correction/max": max(update.correction_max for update in applied),
            "correction/effective_share": per_token([update.effective_share for update in applied]),
            "correction/silenced_share": per_token([update.silenced_share for update in applied]),
        }
    if any(update.kl for update in applied):
        numbers["kl"] = per_token([update.kl for update in applied])
    return numbers


def _part_means(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of each named part of the scores, over the trajectories that have it."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for answer in group.answers:
            for part in answer.score.parts:
                parts.setdefault(f"rewards/{part.name}", []).append(part.value)
    return {name: _mean(values) for name, values in sorted(parts.items())}


def _all_equal(group: Group) -> bool:
    scores = {answer.score.value for answer in group.answers if answer.WhichOneof("outcome") == "score"}
    return len(scores) <= 1


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
