"""What becomes of a reward before anything compares it (docs/math.md, Filters and shaping)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from antiphon.types.v1 import trajectory_pb2

from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.trajectories import sampled_tokens

Key = TypeVar("Key")


def shape(
    rewards: Mapping[Key, float],
    trajectories: Mapping[Key, trajectory_pb2.Trajectory],
    algorithm: AlgorithmConfig,
    max_tokens: int,
) -> dict[Key, float]:
    """Rewards after the penalties for length; an answer that was cut goes, or pays, where the settings say so."""
    shaped = {}
    for key, reward in rewards.items():
        trajectory, value = trajectories[key], reward
        if algorithm.overlong is not None:
            value -= overlong_penalty(
                sampled_tokens(trajectory),
                longest=max_tokens,
                buffer=algorithm.overlong.buffer,
                factor=algorithm.overlong.factor,
            )
        if trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH:
            if algorithm.truncated == "mask":
                continue
            value -= algorithm.truncated_penalty if algorithm.truncated == "penalise" else 0.0
        shaped[key] = value
    return shaped


def overlong_penalty(sampled_tokens: int, *, longest: int, buffer: int, factor: float) -> float:
    """What is taken from the reward of a long answer: grows over the last `buffer` tokens up to `factor`.

        e = min(len - (L_max - buffer), buffer);  penalty = e / buffer * factor if e > 0 else 0

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13.
    Example: longest 100, buffer 20, factor 1: 80 tokens -> 0, 90 -> 0.5, 100 -> 1.
    """
    excess = min(sampled_tokens - (longest - buffer), buffer)
    return excess / buffer * factor if excess > 0 else 0.0
