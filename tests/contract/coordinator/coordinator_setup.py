"""A coordinator, and the simulated services that it runs against: what the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2

from services.coordinator.config import CoordinatorConfig
from tests.conftest import NatsServer
from tests.run_ledger import ledger_rows
from tests.simulated.coordinator import Live, OnEvent, Outcome, process_config, run_coordinator, settings
from tests.simulated.services import Simulation

STEPS, PROMPTS, SAMPLES = 3, 2, 4


class Setup:
    """A simulation and a coordinator to run against it."""

    def __init__(self, folder: Path, nats: NatsServer, run_id: str, simulation: Simulation) -> None:
        self.folder = folder
        self.nats = nats
        self.run_id = run_id
        self.simulation = simulation

    @property
    def learner(self) -> Any:
        return self.simulation.learner

    @property
    def rollout(self) -> Any:
        return self.simulation.rollout

    @property
    def reward(self) -> Any:
        return self.simulation.reward

    async def run(self, on_event: OnEvent | None = None, seed: int = 7, **changes: Any) -> Outcome:
        config: CoordinatorConfig = settings(self.folder, **changes)
        return await run_coordinator(process_config(self.folder, self.nats, self.run_id, config, seed), on_event)

    def ledger(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return ledger_rows(self.folder / "run", query, *values)


def digits(row: learner_pb2.TrainTrajectory) -> float:
    """The reward of a trained row, from its token ids alone: tokens 6 to 31 are a-z, 32 to 41 the digits."""
    answer = [i for i, trained in zip(row.token_ids, row.loss_mask, strict=True) if trained and i >= 6]
    return sum(32 <= i < 42 for i in answer) / len(answer) if answer else 0.0


def stop_in(phase: int, step: int) -> OnEvent:
    stopped: list[bool] = []

    async def stop(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if event.WhichOneof("event") != "phase_changed" or (change.phase, change.step) != (phase, step):
            return
        if not stopped:  # START is entered twice, the second time perhaps when the process is gone
            stopped.append(True)
            await live.stop_run("enough")

    return stop


def failure(kind: int, reason: str) -> reward_pb2.ScoreFailure:
    return reward_pb2.ScoreFailure(kind=kind, reason=reason, message="expected a number, got a cat")


def different_for(text: str, encode: Any) -> Any:
    def wrong(messages: Any) -> list[int]:
        ids: list[int] = encode(messages)
        return [*ids[:-1], 7] if text in messages[-1]["content"] else ids

    return wrong
