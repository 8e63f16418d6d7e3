"""Runs a whole coordinator, as its process does, inside a test, and watches it over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from antiphon.events.v1 import events_pb2

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, parse
from services.common.worker import Worker
from services.coordinator.__main__ import build
from services.coordinator.config import CoordinatorConfig
from tests.simulated.services import write_model_folder

DEADLINE_SECONDS = 30.0
OnEvent = Callable[[events_pb2.RunEvent, "Live"], Awaitable[None]]


def settings(folder: Path, **changes: Any) -> CoordinatorConfig:
    """A run of three Steps of two prompts with four samples; `changes` replace whole sections."""
    training = [{"prompt": f"what is {n}?", "reference": str(n), "level": n % 3} for n in range(5)]
    heldout = [{"prompt": f"and {n}?", "reference": str(n)} for n in range(3)]
    tree: dict[str, Any] = {
        "steps": 3,
        "data": {"path": str(write_rows(folder / "training.jsonl", training))},
        "sampling": {"temperature": 1.0, "max_tokens": 4},
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "scorer": "digits",
        "evaluation": {"path": str(write_rows(folder / "heldout.jsonl", heldout)), "max_tokens": 4},
        "self_check": {"prompts": 2},
        "publication": {"deadline_seconds": 10},
        "start_seconds": 15,
        "replacement_seconds": 0,  # what dies stays dead, unless a test says otherwise
    }
    return parse(CoordinatorConfig, tree | changes, "test")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def process_config(
    folder: Path, nats: Any, run_id: str, config: CoordinatorConfig, seed: int = 7
) -> ProcessConfig[CoordinatorConfig]:
    service = ServiceConfig(
        run_id=run_id,
        worker_id="coordinator-0",
        run_dir=folder / "run",
        nats_url=nats.url,
        nats_monitor_url=nats.monitor_url,
        seed=seed,
        log_level="INFO",
    )
    model = ModelConfig(path=str(write_model_folder(folder / "model")), dtype="float32")
    return ProcessConfig[CoordinatorConfig](service=service, model=model, settings=config)


class Live:
    """A coordinator that runs: its stub and what to ask it."""

    def __init__(self, worker: Worker, peer: Peer) -> None:
        self.worker = worker
        self._peer = peer
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(peer.channel)

    async def get_run(self) -> coordinator_pb2.GetRunResponse:
        return await self._peer.call(
            self._stub.GetRun, coordinator_pb2.GetRunRequest(), deadline_seconds=DEADLINE_SECONDS
        )

    async def stop_run(self, reason: str = "enough") -> None:
        request = coordinator_pb2.StopRunRequest(reason=reason)
        await self._peer.call(self._stub.StopRun, request, deadline_seconds=DEADLINE_SECONDS)

    async def watch(self, from_sequence: int, on_event: OnEvent | None = None) -> list[events_pb2.RunEvent]:
        """Every event until the stream ends."""
        request = coordinator_pb2.WatchRunRequest(from_sequence=from_sequence)
        events = []
        async for answer in self._peer.stream(self._stub.WatchRun, request, deadline_seconds=DEADLINE_SECONDS):
            events.append(answer.event)
            if on_event is not None:
                await on_event(answer.event, self)
        return events


@dataclass
class Outcome:
    """How a run went."""

    exit_code: int
    events: list[events_pb2.RunEvent]
    run_dir: Path

    @property
    def ended(self) -> events_pb2.RunEnded:
        last = self.events[-1]
        assert last.WhichOneof("event") == "run_ended"
        return last.run_ended

    def of(self, kind: str) -> list[Any]:
        """Events of one kind, in order."""
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]

    @property
    def phases(self) -> list[str]:
        """Names of the phases entered, in order."""
        names = [events_pb2.RunPhase.Name(change.phase) for change in self.of("phase_changed")]
        return [name.removeprefix("RUN_PHASE_").lower() for name in names]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


async def run_coordinator(
    process: ProcessConfig[CoordinatorConfig], on_event: OnEvent | None = None, make: Any = build
) -> Outcome:
    """Runs until RunEnded and the end of the process's main function; `make` builds the worker."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        worker = await make(process)
        running = asyncio.create_task(worker.run())
        while not worker.server.port and not running.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)
        assert not running.done(), f"the coordinator ended with {running.result()} before it served"
        peer = Peer("coordinator-0", worker.server.address)
        try:
            events = await Live(worker, peer).watch(0, on_event)
            code = await running
        finally:
            running.cancel()
            await peer.close()
    return Outcome(code, events, process.service.run_dir)
