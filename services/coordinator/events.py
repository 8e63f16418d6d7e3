"""The run's own story, in order: what WatchRun streams. Kept for the life of the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import TypeAlias

from antiphon.events.v1 import events_pb2
from antiphon.types.v1 import policy_pb2

logger = logging.getLogger(__name__)

Phase: TypeAlias = events_pb2.RunPhase

# The contract promises progress at least every 5 s.
HEARTBEAT_SECONDS = 4.0
# Progress that comes faster is thinned out to this.
PROGRESS_SECONDS = 0.25

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class EventLog:
    """Appends events and lets any number of watchers follow."""

    def __init__(self) -> None:
        self._events: list[events_pb2.RunEvent] = []
        self._news = asyncio.Event()
        self._progress = events_pb2.PhaseProgress()
        self._told = 0.0
        self._watching = 0
        self._told_the_end = False
        self.phase: Phase = events_pb2.RUN_PHASE_START

    @property
    def ended(self) -> bool:
        return bool(self._events) and self._events[-1].WhichOneof("event") == "run_ended"

    def enter(self, phase: Phase, step: int, waiting_for: str) -> None:
        """The loop entered a phase and waits for something, said in words with its deadline."""
        self.phase = phase
        self._progress = events_pb2.PhaseProgress(phase=phase, step=step, detail=waiting_for)
        self._told = time.monotonic()
        name = events_pb2.RunPhase.Name(phase).removeprefix("RUN_PHASE_").lower()
        logger.info("step %d, %s: %s", step, name, waiting_for)
        self._append(phase_changed=events_pb2.PhaseChanged(phase=phase, step=step, waiting_for=waiting_for))

    def progress(self, done: int, of: int, detail: str = "") -> None:
        """How far the phase is; told at once unless the last one was told just now."""
        self._progress = events_pb2.PhaseProgress(
            phase=self.phase, step=self._progress.step, done=done, of=of, detail=detail or self._progress.detail
        )
        if done == of or time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._tell_progress()

    async def run_heartbeat(self) -> None:
        """Repeats the progress of a phase in which nothing advances; until cancelled, or the run ended."""
        while not self.ended:
            await asyncio.sleep(HEARTBEAT_SECONDS / 4)
            if time.monotonic() - self._told >= HEARTBEAT_SECONDS * 3 / 4 and not self.ended:
                self._tell_progress()

    def notice(self, level: str, message: str) -> None:
        """Something an operator should read. Level: info, warning or error."""
        logger.log(_LEVELS[level], "%s", message)
        self._append(notice=events_pb2.Notice(level=level, message=message))

    def step_finished(self, step: int, planned: int, metrics: Mapping[str, float]) -> None:
        named = [events_pb2.Metric(name=name, value=value) for name, value in metrics.items()]
        self._append(step_finished=events_pb2.StepFinished(step=step, steps_planned=planned, metrics=named))

    def evaluated(self, result: events_pb2.Evaluated) -> None:
        self._append(evaluated=result)

    def end(self, outcome: str, reason: str, export_path: str, policy: policy_pb2.Policy) -> None:
        """The last event. Outcome: finished, stopped or failed."""
        self.phase = events_pb2.RUN_PHASE_ENDED
        logger.log(_LEVELS["error" if outcome == "failed" else "info"], "run %s. %s", outcome, reason)
        ended = events_pb2.RunEnded(outcome=outcome, reason=reason, export_path=export_path, policy=policy)
        self._append(run_ended=ended)

    async def follow(self, from_sequence: int) -> AsyncIterator[events_pb2.RunEvent]:
        """Events from a sequence number on, those to come included; ends after the last one."""
        position = max(0, from_sequence)
        self._watching += 1
        try:
            while True:
                news = self._news
                while position < len(self._events):
                    yield self._events[position]
                    position += 1
                if self.ended:
                    self._told_the_end = True
                    return
                await news.wait()
        finally:
            self._watching -= 1
            self._wake()

    async def wait_until_told(self, deadline_seconds: float) -> bool:
        """Whether somebody was told the end, and nobody is in the middle of being told, before the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                while self._watching or not self._told_the_end:
                    await self._news.wait()
        return self._told_the_end

    def _tell_progress(self) -> None:
        self._told = time.monotonic()
        self._append(phase_progress=self._progress)

    def _append(self, **event: object) -> None:
        message = events_pb2.RunEvent(sequence=len(self._events), **event)  # type: ignore[arg-type]
        message.time.GetCurrentTime()
        self._events.append(message)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
