"""Controls for experiments: a run that must not learn, to show that a gain of the real one comes from its rewards."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def shuffled_rewards(rewards: Mapping[Key, float], seed: int) -> dict[Key, float]:
    """The same rewards, handed around at random among all trajectories of a Batch; the same seed gives the same."""
    values = list(rewards.values())
    random.Random(seed).shuffle(values)
    return dict(zip(rewards, values, strict=True))
