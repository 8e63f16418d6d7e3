"""From one number per trajectory to one per token (docs/math.md, Order of events). Arrays are [T], one per token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def on_last_trainable(value: float, loss_mask_T: Sequence[bool] | Bools) -> Floats:
    """The value on the last trainable token, 0 elsewhere. Raises ValueError where no token is trainable."""
    trainable = np.flatnonzero(loss_mask_T)
    if not trainable.size:
        raise ValueError("no trainable token to place a value on; such a row belongs in no batch")
    values_T = np.zeros(len(loss_mask_T))
    values_T[trainable[-1]] = value
    return values_T


def discounted_sums(
    values_T: Sequence[float] | Floats, loss_mask_T: Sequence[bool] | Bools, gamma: float = 1.0
) -> Floats:
    """A_t = sum over trainable k >= t of gamma^(k-t) values_k, counting trainable tokens only; 0 at masked positions.

    Masked positions may hold anything, NaN included: they are never read.
    """
    mask_T = np.asarray(loss_mask_T, dtype=np.bool_)
    backwards = np.asarray(values_T, dtype=np.float64)[mask_T][::-1]
    if gamma == 1.0:
        sums = np.cumsum(backwards)
    else:  # numpy has no such recurrence
        sums = np.fromiter(
            itertools.accumulate(backwards.tolist(), lambda following, value: value + gamma * following), np.float64
        )
    sums_T = np.zeros(len(mask_T))
    sums_T[mask_T] = sums[::-1]
    return sums_T
