"""Which prompt is the n-th that a run visits: a pure function of seed and n, so any position can be found again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

from services.coordinator.data.prompts import Dataset, Prompt
from services.coordinator.identity import PromptKey


class Order:
    """The prompts of one data set or of several, as a run visits them. All that there is to resume is the position.

    Several are interleaved by weight: the k-th visit (k = 0, 1, …) of a data set of weight w is due at (k + 1/2) / w,
    and visits happen as they are due, equals in the order of the data sets. So after any number of prompts the visits
    of one of D data sets differ by at most (1 + D x its share) / 2 from its share, and each has epochs of its own.
    """

    def __init__(self, *datasets: Dataset, seed: int, shuffle: bool) -> None:
        self._epochs = [_Epochs(dataset, seed=seed, shuffle=shuffle) for dataset in datasets]
        # By what was written, 0.1 and not its nearest binary fraction: no rounding, the same on every machine.
        self._weights = [Fraction(str(dataset.weight)) for dataset in datasets]

    def at(self, position: int) -> tuple[PromptKey, Prompt]:
        """The prompt at a position counted from 0 over all data sets and epochs."""
        if len(self._epochs) == 1:
            return self._epochs[0].at(position)
        number, visit = self._visit_at(position)
        return self._epochs[number].at(visit)

    def _visit_at(self, position: int) -> tuple[int, int]:
        """(data set, its visit) at a position."""
        # Every visit due by this time happens before the position: their number is at most its weight x time + D / 2.
        time = Fraction(position - len(self._weights)) / sum(self._weights)
        visits = [max(0, math.floor(weight * time + Fraction(1, 2))) for weight in self._weights]
        while True:
            due = [(visit + Fraction(1, 2)) / weight for visit, weight in zip(visits, self._weights, strict=True)]
            number = due.index(min(due))
            if sum(visits) == position:
                return number, visits[number]
            visits[number] += 1


class _Epochs:
    """One data set, again and again, each time in another order."""

    def __init__(self, dataset: Dataset, *, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._prompts: Sequence[Prompt] = ()

    def at(self, visit: int) -> tuple[PromptKey, Prompt]:
        epoch, place = divmod(visit, len(self._dataset.prompts))
        if epoch != self._epoch:
            self._epoch, self._prompts = epoch, self._order_of(epoch)
        prompt = self._prompts[place]
        return PromptKey(self._dataset.name, epoch, prompt.row), prompt

    def _order_of(self, epoch: int) -> Sequence[Prompt]:
        """By a hash of the row: the same on every machine and version of Python."""
        if not self._shuffle:
            return self._dataset.prompts
        prefix = f"{self._seed}/{self._dataset.name}/{epoch}/"
        return sorted(
            self._dataset.prompts, key=lambda prompt: hashlib.sha256(f"{prefix}{prompt.row}".encode()).digest()
        )
