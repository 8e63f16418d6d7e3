"""Advantages of a whole Batch brought to mean 0 and variance 1 (docs/math.md, Advantages)."""

from __future__ import annotations

import math
from collections.abc import Sequence

VARIANCE_FLOOR = 1e-8


def whiten(rows: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """A <- (A - mean) / sqrt(var + 1e-8) over every trainable token of every row, [T] each; 0 at masked positions.

    Mean and biased variance, two-pass; padding and the cut into ranks or micro-batches do not matter to it. Masked
    positions are never read.
    """
    present = [
        a for row, mask in zip(rows, masks, strict=True) for a, trained in zip(row, mask, strict=True) if trained
    ]
    if not present:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(present) / len(present)
    scale = math.sqrt(math.fsum((a - mean) ** 2 for a in present) / len(present) + VARIANCE_FLOOR)
    return [
        [(a - mean) / scale if trained else 0.0 for a, trained in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]
