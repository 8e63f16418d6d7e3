"""Whether this worker can do all that it offers: its scorers, and its reference model."""

from __future__ import annotations

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.reward.reference import Reference
from services.reward.scorer import ScorerSet


class Readiness:
    """What health and announcement say."""

    def __init__(self, scorers: ScorerSet, reference: Reference | None) -> None:
        self._scorers = scorers
        self._process = None if reference is None else reference.process

    def problem(self) -> str | None:
        """None when all works."""
        return self._scorers.problem() or (None if self._process is None else self._process.problem)

    async def check_health(self) -> str | None:
        return self.problem()

    def describe(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        """Fills in the state."""
        if self.problem() is None:
            announcement.state = tenant_pb2.WORKER_STATE_READY
        elif self._scorers.problem() is None and self._process is not None and self._process.is_loading:
            announcement.state = tenant_pb2.WORKER_STATE_STARTING
        else:
            announcement.state = tenant_pb2.WORKER_STATE_FAILED
