"""Whether this worker can do all that it offers."""

from __future__ import annotations

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.reward.scorer import ScorerSet


class Readiness:
    """What health and announcement say."""

    def __init__(self, scorers: ScorerSet) -> None:
        self._scorers = scorers

    def problem(self) -> str | None:
        """None when all works."""
        return self._scorers.problem()

    async def check_health(self) -> str | None:
        return self.problem()

    def describe(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        """Fills in the state."""
        if self.problem() is None:
            announcement.state = tenant_pb2.WORKER_STATE_READY
        else:
            announcement.state = tenant_pb2.WORKER_STATE_FAILED
