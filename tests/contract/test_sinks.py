"""A whole run whose sinks work, raise and hang, with the three services simulated."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from services.coordinator import run as run_module
from tests.conftest import NatsServer
from tests.simulated.coordinator import process_config, run_coordinator, settings
from tests.simulated.services import simulated_services
from tests.simulated.sinks import SimulatedTrackio, SimulatedWandb


async def test_a_run_ends_as_it_would_without_its_sinks(
    tmp_path: Path, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, trackio, free = SimulatedWandb(), SimulatedTrackio(), threading.Event()
    for library in (wandb, trackio):
        monkeypatch.setitem(sys.modules, library.__name__, library)
        monkeypatch.delitem(sys.modules, f"services.coordinator.sinks.{library.__name__}", raising=False)
    monkeypatch.setattr(run_module, "LAST_LINES_SECONDS", 0.3)
    wandb.on_log = lambda step: None if step < 2 else (free.wait(30), None)[1]
    try:
        async with simulated_services(nats.url, "sinks"):
            config = settings(tmp_path, sinks=["trackio", "wandb"])
            outcome = await run_coordinator(process_config(tmp_path, nats, "sinks", config))
        taken = list(wandb.runs["sinks"])
    finally:
        free.set()
    assert (outcome.ended.outcome, outcome.exit_code) == ("finished", 0)
    lines = [(line["step"], line.get("loss")) for line in outcome.metrics]
    assert [(step, numbers.get("loss")) for step, numbers in trackio.runs["sinks"]] == lines
    assert taken == [0, 1]
    (told,) = (notice.message for notice in outcome.of("notice") if "sink" in notice.message)
    assert told.startswith("sink wandb: 3 line(s) of ")  # steps 2 and 3, and the evaluation at the end
