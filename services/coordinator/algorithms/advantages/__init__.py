"""Advantage estimators, one small file each (docs/math.md, Advantages)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Advantages of one group."""

    advantages_G: list[float]
    """One per row, in the order of the rewards; 0 where the row takes no part."""
    signal: bool
    """False where the group teaches nothing: all rewards equal, or a survivor alone."""
