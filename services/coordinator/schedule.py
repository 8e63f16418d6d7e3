"""When to admit, when to publish, who holds the GPUs: all that sets schedules apart (docs/design.md §5).

Pure: a schedule sees counts and answers. The loop is the same code for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.events.v1 import events_pb2

ALL_KINDS = frozenset({events_pb2.WORKER_KIND_ROLLOUT, events_pb2.WORKER_KIND_REWARD, events_pb2.WORKER_KIND_LEARNER})


@dataclass(frozen=True)
class Counts:
    """Where the run stands, in groups. Example: 3 running, 5 finished, 16 trained of batch 8 under version 2."""

    running: int
    """Admitted, not every score there."""
    finished: int
    """Waiting for their Step."""
    trained: int
    """Left by way of a Step that was applied."""
    published: int
    """Oldest policy version among the engines in routing."""
    batch: int
    """Groups of one Step."""


class Schedule(Protocol):
    """Answers the loop's three questions."""

    def may_admit(self, counts: Counts) -> bool:
        """Whether one more group may be admitted now."""
        ...

    def publishes_after(self, step: int) -> bool:
        """Whether the policy of this Step goes to the engines."""
        ...

    def holders(self, phase: events_pb2.RunPhase) -> frozenset[events_pb2.WorkerKind]:
        """The kinds of worker that hold GPUs in a phase."""
        ...


class Sync:
    """GPUs apart, one batch at a time, strictly on policy: the next batch waits for the policy of the last."""

    def may_admit(self, counts: Counts) -> bool:
        return counts.running + counts.finished + counts.trained < (counts.published + 1) * counts.batch

    def publishes_after(self, step: int) -> bool:
        return True

    def holders(self, phase: events_pb2.RunPhase) -> frozenset[events_pb2.WorkerKind]:
        return ALL_KINDS  # every worker has its own


SCHEDULES: dict[str, type[Schedule]] = {"sync": Sync}
