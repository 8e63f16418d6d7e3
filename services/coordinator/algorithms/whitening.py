"""Advantages of a whole Batch brought to mean 0 and variance 1 (docs/math.md, Advantages)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.coordinator.algorithms.placement import Bools, Floats

VARIANCE_FLOOR = 1e-8


def whiten(rows: Sequence[Floats], masks: Sequence[Bools]) -> list[Floats]:
    """A <- (A - mean) / sqrt(var + 1e-8) over every trainable token of every row, [T] each; 0 at masked positions.

    Mean and biased variance, two-pass and summed exactly: padding, the order of the rows and their cut into ranks or
    micro-batches do not matter to it. Masked positions are never read.
    """
    present = np.concatenate([np.zeros(0), *(row[mask] for row, mask in zip(rows, masks, strict=True))])
    if not present.size:
        return [np.zeros(len(row)) for row in rows]
    mean = math.fsum(present.tolist()) / present.size
    scale = math.sqrt(math.fsum(((present - mean) ** 2).tolist()) / present.size + VARIANCE_FLOOR)
    whitened = []
    for row, mask in zip(rows, masks, strict=True):
        whitened.append(np.zeros(len(row)))
        whitened[-1][mask] = (row[mask] - mean) / scale
    return whitened
