"""Group-relative advantages: each answer against its siblings.

    A_i = (R_i - mean_G) / (std_G + 1e-6); without norm_by_std: A_i = R_i - mean_G.

Source: Shao et al. 2024, DeepSeekMath, section 4.1; docs/math.md, Advantages and Order of events. std is unbiased
(G - 1) and two-pass, in float64: the one-pass form cancels and makes thousands of a group of equal rewards and one odd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.coordinator.algorithms.advantages import Estimate

STD_FLOOR = 1e-6


def grpo(rewards_G: Sequence[float | None], *, norm_by_std: bool = True) -> Estimate:
    """Advantages of one group from its rewards, [G] to [G].

    None marks a row that takes no part (no score, no trainable token): it moves no mean and no spread, and gets 0.
    A group whose rewards are all equal, or that has one survivor, carries no signal: exactly 0 for each.

    Example: [1, 0, None] -> [0.7071, -0.7071, 0].
    """
    present = [reward for reward in rewards_G if reward is not None]
    if len(present) < 2 or min(present) == max(present):
        return Estimate([0.0] * len(rewards_G), signal=False)
    mean = math.fsum(present) / len(present)
    scale = 1.0
    if norm_by_std:
        variance = math.fsum((reward - mean) ** 2 for reward in present) / (len(present) - 1)
        scale = math.sqrt(variance) + STD_FLOOR
    return Estimate([0.0 if reward is None else (reward - mean) / scale for reward in rewards_G], signal=True)
