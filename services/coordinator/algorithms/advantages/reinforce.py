"""REINFORCE: the reward itself, with no baseline of its group; the whitening of the whole Batch is its baseline.

Source: Hu 2025, REINFORCE++, arXiv:2501.03262; docs/math.md, Advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.coordinator.algorithms.advantages import Estimate


def reinforce(rewards_G: Sequence[float | None]) -> Estimate:
    """[G] to [G]; a row that takes no part gets 0. Groups do not matter here, so none is without signal."""
    return Estimate([0.0 if reward is None else reward for reward in rewards_G], signal=True)
