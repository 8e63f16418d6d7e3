"""Advantage estimators: a baseline within the group, and what becomes of it over tokens and over the Batch.

R -> baseline, / std where the estimator says so -> clip to +-10 -> last trainable token -> discounted sums ->
whitening where the estimator says so                                   (docs/math.md, Order of events)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from services.coordinator.algorithms import placement
from services.coordinator.algorithms.advantages import Baseline
from services.coordinator.algorithms.placement import Bools, Floats
from services.coordinator.algorithms.whitening import whiten

CLIP = 10.0

Key = TypeVar("Key")


@dataclass(frozen=True)
class Advantages(Generic[Key]):
    """Of one Batch."""

    rows: dict[Key, Floats]
    """Per token, [T], of each row that takes part; 0 at masked positions."""
    without_signal: int
    """Groups whose advantages are all 0 because their spread is, or because one row is left."""


@dataclass(frozen=True)
class Estimator:
    """One of docs/math.md's."""

    baseline: Baseline
    compares: bool
    """Within the group: one sample is too few."""
    gamma: float = 1.0
    whitens: bool = False

    def __call__(
        self, groups: Sequence[Sequence[Key]], rewards: Mapping[Key, float], masks: Mapping[Key, Bools]
    ) -> Advantages[Key]:
        """Advantages of a Batch from the rewards of the rows that take part; each of them has a trainable token.

        `groups` are all rows by group, in an order that does not matter to the result.
        """
        rows: dict[Key, Floats] = {}
        silent: list[Sequence[Key]] = []
        for keys in groups:
            estimate = self.baseline([rewards.get(key) for key in keys])
            if not estimate.signal:
                silent.append(keys)
            for key, value in zip(keys, estimate.advantages_G, strict=True):
                if key in rewards:
                    rows[key] = self._over_tokens(max(-CLIP, min(CLIP, value)), masks[key])
        if self.whitens:
            rows = dict(zip(rows, whiten(list(rows.values()), [masks[key] for key in rows]), strict=True))
            for key in (key for keys in silent for key in keys if key in rows):
                rows[key] = np.zeros_like(rows[key])  # the mean of the others is no signal either
        return Advantages(rows, len(silent))

    def _over_tokens(self, value: float, loss_mask_T: Bools) -> Floats:
        return placement.discounted_sums(placement.on_last_trainable(value, loss_mask_T), loss_mask_T, self.gamma)
