"""Leave-one-out: each answer against the mean of its siblings.

    A_i = R_i - (sum of the R_j of the others) / (G - 1)

Source: Ahmadian et al. 2024, arXiv:2402.14740, equation 7; docs/math.md, Advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.coordinator.algorithms.advantages import Estimate


def rloo(rewards_G: Sequence[float | None]) -> Estimate:
    """Advantages of one group, [G] to [G]; G counts the rows that take part. No signal: exactly 0 for each.

    Example: [1, 0, 0] -> [1, -0.5, -0.5].
    """
    present = [reward for reward in rewards_G if reward is not None]
    if len(present) < 2 or min(present) == max(present):
        return Estimate([0.0] * len(rewards_G), signal=False)
    total, others = math.fsum(present), len(present) - 1
    return Estimate([0.0 if r is None else r - (total - r) / others for r in rewards_G], signal=True)
