"""Whether a process that died is started again, and after which pause.

Each has the same budget for the whole command, and each pause is twice the one before, up to a few seconds. Killed by a
signal, it is always worth another try. What ended by itself before the run had begun would end so again, as does one
that says that its configuration is wrong; the coordinator ends by itself when the run has ended.
"""

from __future__ import annotations

import collections

WRONG_CONFIGURATION = 2
"""Exit code of a service (services/common/worker.py)."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 4.0


class Restarts:
    """Counts the starts of each process after its first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._taken: collections.Counter[str] = collections.Counter()

    def taken(self, worker_id: str) -> int:
        return self._taken[worker_id]

    def allowed(self, worker_id: str, exit_code: int, *, begun: bool, ends_by_itself: bool = False) -> bool:
        """Whether the budget and the way it died allow one more. `begun`: the run was past its start."""
        if self._taken[worker_id] >= self._budget:
            return False
        return exit_code < 0 or (begun and not ends_by_itself and exit_code != WRONG_CONFIGURATION)

    def take(self, worker_id: str) -> float:
        """Takes one from the budget; answers the seconds to wait before it."""
        self._taken[worker_id] += 1
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self._taken[worker_id] - 1), LONGEST_PAUSE_SECONDS)

    def describe(self, worker_id: str) -> str:
        """Like "2 of 3"."""
        return f"{self._taken[worker_id]} of {self._budget}"
