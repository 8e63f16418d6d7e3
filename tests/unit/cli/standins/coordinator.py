"""A coordinator that tells a story instead of training. `STANDIN_COORDINATOR` says which:

finish: two Steps, then the end.   train: one Step, then in the phase train until it is stopped.
start: never gets past the start.  deaf: as train, but StopRun changes nothing.
fail: the run fails.               die: the process dies in the phase train.      mute: it never announces itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from antiphon.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from antiphon.events.v1 import events_pb2
from antiphon.types.v1 import policy_pb2

from services.common.config import ProcessConfig
from services.common.worker import Worker, main
from services.coordinator.config import CoordinatorConfig

FULL_NAME = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


class Story(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, process: ProcessConfig[CoordinatorConfig], how: str) -> None:
        self._process = process
        self._how = how
        self._events: list[events_pb2.RunEvent] = []
        self._news = asyncio.Condition()
        self._stop = asyncio.Event()

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[coordinator_pb2.WatchRunResponse]:
        position = request.from_sequence
        while True:
            async with self._news:
                while len(self._events) <= position:
                    await self._news.wait()
            event = self._events[position]
            position += 1
            yield coordinator_pb2.WatchRunResponse(event=event)
            if event.WhichOneof("event") == "run_ended":
                return

    async def StopRun(self, request: Any, context: Any) -> coordinator_pb2.StopRunResponse:
        if self._how != "deaf":
            self._stop.set()
        return coordinator_pb2.StopRunResponse()

    async def tell(self) -> None:
        how = self._how
        await self._say(notice=events_pb2.Notice(level="info", message=f"story: {how}"))
        await self._enter("START", 0)
        if how == "start":
            await self._stop.wait()
            return await self._end("stopped", 0)
        if how == "fail":
            return await self._end("failed", 0, "learner-0: out of memory; its log is /logs/learner-0.log")
        await self._say(evaluated=events_pb2.Evaluated(dataset="evaluation", prompts=200, score_mean=0.125))
        for step in range(1, 3):
            await self._enter("GENERATE", step)
            await self._say(phase_progress=events_pb2.PhaseProgress(phase=events_pb2.RUN_PHASE_GENERATE, done=3, of=8))
            await self._enter("TRAIN", step)
            if how != "finish" and step == 2:
                if how == "die":
                    await asyncio.to_thread(_wait_for, self._process.service.run_dir / "die")  # the test says when
                    print("no more ideas", file=sys.stderr, flush=True)
                    os._exit(9)
                await self._stop.wait()
                return await self._end("stopped", 1)
            await self._enter("PUBLISH", step)
            metrics = [events_pb2.Metric(name="reward", value=step / 4)]
            await self._say(step_finished=events_pb2.StepFinished(step=step, steps_planned=2, metrics=metrics))
        result = events_pb2.Evaluated(dataset="evaluation", policy_version=2, prompts=200, score_mean=0.875)
        await self._say(evaluated=result)
        return await self._end("finished", 2)

    async def _enter(self, phase: str, step: int) -> None:
        changed = events_pb2.PhaseChanged(phase=f"RUN_PHASE_{phase}", step=step, waiting_for="the story to go on")
        await self._say(phase_changed=changed)

    async def _end(self, outcome: str, version: int, reason: str = "") -> None:
        export = str(self._process.service.run_dir / "export") if version else ""
        policy = policy_pb2.Policy(version=version)
        ended = events_pb2.RunEnded(outcome=outcome, reason=reason, export_path=export, policy=policy)
        await self._say(run_ended=ended)

    async def _say(self, **event: Any) -> None:
        message = events_pb2.RunEvent(sequence=len(self._events), **event)
        message.time.GetCurrentTime()
        async with self._news:
            self._events.append(message)
            self._news.notify_all()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


async def build(process: ProcessConfig[CoordinatorConfig]) -> Worker:
    how = os.environ["STANDIN_COORDINATOR"]
    if how == "mute":
        await asyncio.sleep(600)
    story = Story(process, how)
    worker = Worker(process.service, events_pb2.WORKER_KIND_COORDINATOR)
    worker.server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, story, FULL_NAME)
    worker.beside("story", story.tell)
    return worker


if __name__ == "__main__":
    sys.exit(main("standin", CoordinatorConfig, build))
