"""What is kept when a run ends: the exported policy, and at a stop a checkpoint. Both by the learner."""

from __future__ import annotations

import asyncio
import shutil

from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2

from services.common.config import ServiceConfig
from services.common.errors import Conflict, Expired
from services.coordinator.checkpoints import Checkpoints
from services.coordinator.clients import LearnerClient
from services.coordinator.config import CoordinatorConfig
from services.coordinator.events import EventLog
from services.coordinator.recovery import Recovery
from services.coordinator.waits import StopSignal, within

# An export after an error is worth a try, not a wait.
EXPORT_AFTER_FAILURE_SECONDS = 60.0


class Ending:
    """The end of one life of a run, which began with the policy of version `began_with`."""

    def __init__(
        self,
        service: ServiceConfig,
        config: CoordinatorConfig,
        *,
        events: EventLog,
        recovery: Recovery,
        checkpoints: Checkpoints,
        stop: StopSignal,
        began_with: int,
        chat_template: str,
    ) -> None:
        self._folder = service.run_dir / "export"
        self._run_id = service.run_id
        self._config = config
        self._events = events
        self._recovery = recovery
        self._checkpoints = checkpoints
        self._stop = stop
        self._began_with = began_with
        self._chat_template = chat_template

    async def export(self, version: int) -> str:
        """The folder of the policy of this version, the last one; a learner that dies is waited for."""
        seconds = self._config.export_seconds

        async def work() -> str:
            return await self._export(await self._recovery.learner(), version, seconds)

        return await self._recovery.through(f"export of version {version}", work)

    async def export_if_possible(self, version: int) -> str:
        """After a stop or an error: what was trained is kept if the learner still answers; empty where it does not."""
        left = self._stop.seconds_left(self._config.stop_bound_seconds)
        seconds = min(self._config.export_seconds, EXPORT_AFTER_FAILURE_SECONDS, left)
        try:
            if seconds <= 0.0:
                raise Expired("the time of a stop was over (stop_seconds)")
            return await self._export(self._recovery.learner_at_hand(), version, seconds)
        except Exception as error:
            self._events.notice("error", f"the last policy was not exported: {error}")
            return ""

    async def save_if_possible(self, step: int) -> None:
        """After a stop: what is not saved would be replayed."""
        try:
            seconds = self._stop.seconds_left(self._config.stop_bound_seconds)
            await self._checkpoints.save(step, self._recovery.learner_at_hand(), seconds)
        except Exception as error:
            self._events.notice("error", f"no checkpoint of step {step}: {error}")

    async def _export(self, learner: LearnerClient, version: int, seconds: float) -> str:
        path = (self._folder / f"policy-{version}").resolve()
        if path.exists() and version == self._began_with:
            return str(path)  # of an earlier life of this run, which ended here: it is there whole or not at all
        path.parent.mkdir(parents=True, exist_ok=True)
        what = f"{learner.worker_id} to write {path}"
        self._events.enter(events_pb2.RUN_PHASE_EXPORT, version, f"{what}, {seconds:.0f} s at most")
        # The same in each life of the coordinator: one attaches to what another began.
        request = learner_pb2.ExportRequest(
            request_id=f"{self._run_id}/policy-{version}", path=str(path), chat_template=self._chat_template
        )
        async with within(seconds, what):
            written, policy = await learner.export(
                request, seconds, lambda p: self._events.progress(p.done, p.of, p.phase)
            )
        if policy.version != version:
            # A Step that a stop gave up was applied meanwhile: no folder is better than one of a wrong name.
            await asyncio.to_thread(shutil.rmtree, written, ignore_errors=True)
            raise Conflict(f"{learner.worker_id}: expected to export version {version}, it wrote {policy.version}")
        return written
