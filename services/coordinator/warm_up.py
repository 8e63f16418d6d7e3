"""A Step without effect on the longest rows that may come up: what does not fit shows before anything is paid for."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages
from services.coordinator.algorithms.objectives import objective
from services.coordinator.batch import plan_updates
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Dataset


def longest_batch(
    training: Sequence[Dataset], config: CoordinatorConfig, *, step: int, seed: int
) -> tuple[learner_pb2.StepHeader, list[learner_pb2.TrainTrajectory]]:
    """As many rows as a Step has, each as long as the longest prompt with the longest answer.

    Tokens are the prompt's own; each row begins elsewhere in it, for rows that begin alike may share what they have.
    """
    prompt = max((p for dataset in training for p in dataset.prompts), key=lambda p: len(p.token_ids)).token_ids
    asked, answered = len(prompt), config.sampling.max_tokens
    mask = [False] * asked + [True] * answered
    rows = [
        learner_pb2.TrainTrajectory(
            trajectory_id=f"warm-up/{number}",
            token_ids=[prompt[(number + place) % asked] for place in range(asked + answered)],
            loss_mask=mask,
            advantages=[float(inside) for inside in mask],
            behavior_logprobs=[0.0] * len(mask),
            reference_logprobs=[0.0] * len(mask) if config.algorithm.kl is not None else (),
        )
        for number in range(config.trajectories_per_step)
    ]
    algorithm = config.algorithm
    updates = plan_updates(rows, epochs=1, mini_batches=algorithm.mini_batches, seed=seed, step=step)
    header = learner_pb2.StepHeader(
        step_id=step,
        batch_digest=digest_messages(rows),
        policy=objective(algorithm, config.sampling),
        updates=updates[:1],
        trajectory_count=len(rows),
        dry_run=True,
    )
    return header, rows


def told(result: learner_pb2.StepResult, tokens: int) -> str:
    """What the ranks held, for a line of the log."""
    ranks = ", ".join(
        f"rank {peak.rank} {peak.bytes / 2**30:.2f} of {peak.total_bytes / 2**30:.2f} GiB ({peak.device})"
        for peak in result.peaks
    )
    return f"warm-up with rows of {tokens} tokens, the longest that may come: {ranks}"
