"""The groups that were admitted and not trained, in the order of the prompts, and which of them are whose Step's.

Without a filter each Step has the next `prompts_per_step` of them. With one, groups that were filtered or could not be
scored leave, and each is replaced by the next prompt in order: a Step is full when so many that stay were admitted
for it, or when it has had its most. So where a Step begins follows from what became of the groups before it, and the
ledger keeps it with each Batch. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.coordinator.groups import Group
from services.coordinator.schedule import Counts


@dataclass(frozen=True)
class Share:
    """What falls to the next Step, as far as it is known."""

    groups: list[Group]
    """In admission order, those that left included."""
    kept: list[Group]
    """Those that stay, so far."""
    lacking: int
    """Groups that are still to be admitted for this Step, as things stand: more when one leaves yet."""
    end: int
    """Position in the order of the prompts after the last of them."""

    @property
    def complete(self) -> bool:
        return not self.lacking and all(group.finished for group in self.groups)


class Admissions:
    """Counts in groups. `wanted` are those of one Step, `most` those sampled for it at most."""

    def __init__(self, *, wanted: int, most: int, refills: bool, steps: int, steps_done: int, position: int) -> None:
        """`position`: of the first prompt of the Step after `steps_done`."""
        self._wanted = wanted
        self._most = most
        self._refills = refills
        self._steps = steps
        self._steps_done = steps_done
        self.position = position
        """In the order of the prompts, of the one that is admitted next."""
        self._groups: list[Group] = []

    @property
    def step(self) -> int:
        """The Step that a group admitted now would be for."""
        return self._steps_done + 1 + self._places() // self._wanted

    @property
    def all_admitted(self) -> bool:
        """No planned Step lacks a group, as things stand."""
        return self.step > self._steps

    def counts(self, published: int) -> Counts:
        """What a schedule decides by; a Step that is full counts with all its places."""
        running = sum(not group.finished for group in self._groups)
        return Counts(
            running=running,
            finished=self._places() - running,
            trained=self._steps_done * self._wanted,
            published=published,
            batch=self._wanted,
        )

    def add(self, group: Group) -> None:
        """The prompt at `position` was admitted."""
        self._groups.append(group)
        self.position += 1

    def share(self) -> Share:
        """What falls to the next Step."""
        groups, full = self._cut(self._groups)
        kept = [group for group in groups if not group.has_left] if self._refills else groups
        lacking = 0 if full else min(self._wanted - len(kept), self._most - len(groups))
        return Share(groups, kept, lacking, self.position - len(self._groups) + len(groups))

    def trained(self, share: Share) -> None:
        """The Step of this share was applied."""
        del self._groups[: len(share.groups)]
        self._steps_done += 1

    def _leavers(self, groups: Sequence[Group]) -> bool:
        return self._refills and any(group.has_left for group in groups)

    def _cut(self, groups: Sequence[Group]) -> tuple[list[Group], bool]:
        """The groups at the front that are one Step's, and whether it is full."""
        if not self._leavers(groups):
            return list(groups[: self._wanted]), len(groups) >= self._wanted
        staying = 0
        for number, group in enumerate(groups, 1):
            staying += not group.has_left
            if staying == self._wanted or number == self._most:
                return list(groups[:number]), True
        return list(groups), False

    def _places(self) -> int:
        """Places in Steps that are taken: one by each group that stays, and all of a Step that is full."""
        if not self._leavers(self._groups):
            return len(self._groups)
        rest: Sequence[Group] = self._groups
        places = 0
        while True:
            groups, full = self._cut(rest)
            if not full:
                return places + sum(not group.has_left for group in groups)
            places += self._wanted
            rest = rest[len(groups) :]


def trajectories(groups: Iterable[Group]) -> int:
    """How many the groups come to, when all are there."""
    return sum(group.samples for group in groups)
