"""From one number per trajectory to one per token (docs/math.md, Order of events). Lists are [T], one per token."""

from __future__ import annotations

from collections.abc import Sequence


def on_last_trainable(value: float, loss_mask_T: Sequence[bool]) -> list[float]:
    """The value on the last trainable token, 0 elsewhere. Raises ValueError where no token is trainable."""
    last = max((t for t, trainable in enumerate(loss_mask_T) if trainable), default=None)
    if last is None:
        raise ValueError("no trainable token to place a value on; such a row belongs in no batch")
    return [value if t == last else 0.0 for t in range(len(loss_mask_T))]


def discounted_sums(values_T: Sequence[float], loss_mask_T: Sequence[bool], gamma: float = 1.0) -> list[float]:
    """A_t = sum over trainable k >= t of gamma^(k-t) values_k, counting trainable tokens only; 0 at masked positions.

    Masked positions may hold anything, NaN included: they are never read.
    """
    sums_T = [0.0] * len(values_T)
    following = 0.0
    for t in reversed(range(len(values_T))):
        if loss_mask_T[t]:
            following = values_T[t] + gamma * following
            sums_T[t] = following
    return sums_T
