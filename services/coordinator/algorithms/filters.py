"""Which groups are worth training on, by their raw scores alone (docs/math.md, Filters; DAPO, arXiv:2503.14476, §3.2).

A group of fewer than two scores that take part teaches nothing, whatever the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def by_spread(scores_G: Sequence[float], *, tolerance: float) -> bool:
    """Whether highest and lowest score are further apart than the tolerance. Example: [1, 1, 0] at 0 -> True."""
    return len(scores_G) > 1 and max(scores_G) - min(scores_G) > tolerance


def by_mean(scores_G: Sequence[float], *, above: float, below: float) -> bool:
    """Whether above < mean < below: neither too hard nor too easy. Example: [1, 1, 0] between 0 and 1 -> True."""
    return len(scores_G) > 1 and above < math.fsum(scores_G) / len(scores_G) < below
