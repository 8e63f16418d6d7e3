"""What a reward is worth against its siblings, one small file each (docs/math.md, Advantages)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """R̃ of one group."""

    advantages_G: list[float]
    """One per row, in the order of the rewards; 0 where the row takes no part."""
    signal: bool
    """False where the group teaches nothing: all rewards equal, or a survivor alone."""


Baseline = Callable[[Sequence[float | None]], Estimate]
"""Rewards of one group, None where a row takes no part, to their R̃."""
