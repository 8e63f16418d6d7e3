"""Watching and stopping a run, by its RPCs and by a signal to its process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.config import dump
from services.common.errors import InvalidRequest
from tests.contract.coordinator.coordinator_setup import PROMPTS, STEPS, Setup, stop_in
from tests.simulated.coordinator import Live, process_config, settings


async def test_get_run_and_watch_run_from_a_sequence_number(setup: Setup) -> None:
    states = []
    late: list[asyncio.Task[list[events_pb2.RunEvent]]] = []

    async def look(event: events_pb2.RunEvent, live: Live) -> None:
        if event.WhichOneof("event") != "step_finished":
            return
        states.append(await live.get_run())
        if event.step_finished.step == 2:
            late.append(asyncio.create_task(live.watch(3)))
            with pytest.raises(InvalidRequest, match="from_sequence"):
                await live.watch(-1)

    outcome = await setup.run(look)
    assert [(s.run_id, s.steps_planned) for s in states] == [(setup.run_id, STEPS)] * STEPS
    assert [s.steps_done for s in states] == sorted(s.steps_done for s in states)
    assert states[-1].steps_done == states[-1].policy_version == STEPS
    assert await late[0] == outcome.events[3:]


@pytest.mark.parametrize(
    ("phase", "step", "trained"),
    [
        ("START", 0, 0),
        ("PUBLISH", 0, 0),
        ("CHECK", 0, 0),
        ("EVALUATE", 0, 0),
        ("GENERATE", 1, 0),
        ("GENERATE", 2, 1),
        ("SCORE", 2, 1),
        ("TRAIN", 2, 2),
        ("PUBLISH", 2, 2),
    ],
)
async def test_stop_run_in_each_phase(make_setup: Callable[..., Any], phase: str, step: int, trained: int) -> None:
    """What the stop must interrupt would last for minutes; what it must wait for lasts a while."""
    starting = phase == "START"
    setup = await make_setup(
        rollout_state=tenant_pb2.WORKER_STATE_STARTING if starting else tenant_pb2.WORKER_STATE_STALE
    )
    if (phase, step) == ("PUBLISH", 0):
        setup.learner.publish_delay_seconds = 100.0
    data_set = {"CHECK": "self-check", "EVALUATE": "evaluation", "GENERATE": "train"}.get(phase)

    held: list[str] = []
    all_held = asyncio.Event()

    def generate_seconds(request: rollout_pb2.GenerateRequest) -> float:
        at_step = phase != "GENERATE" or request.policy_version == step - 1
        if request.prompt_id.dataset != data_set or not at_step:
            return 0.0
        held.append(request.request_id)
        if len(held) == PROMPTS:
            all_held.set()
        return 100.0

    def score_seconds(candidate: reward_pb2.Candidate) -> float:
        at_step = setup.learner.version == step - 1 and candidate.prompt_id.dataset == "train"
        return 100.0 if phase == "SCORE" and at_step else 0.0

    def at_train(header: learner_pb2.StepHeader) -> None:
        setup.learner.train_delay_seconds = 0.3 if (phase, step) == ("TRAIN", header.step_id) else 0.0
        setup.learner.publish_delay_seconds = 0.3 if (phase, step) == ("PUBLISH", header.step_id) else 0.0

    setup.rollout.delay_seconds = generate_seconds
    setup.reward.delay_seconds = score_seconds
    setup.learner.on_train = at_train
    stop = stop_in(events_pb2.RunPhase.Value(f"RUN_PHASE_{phase}"), step)

    async def when_it_generates(event: events_pb2.RunEvent, live: Live) -> None:
        if (event.phase_changed.phase, event.phase_changed.step) == (events_pb2.RUN_PHASE_GENERATE, step):
            await all_held.wait()
        await stop(event, live)

    outcome = await setup.run(when_it_generates if phase == "GENERATE" else stop)

    assert (outcome.ended.outcome, outcome.ended.reason, outcome.exit_code) == ("stopped", "enough", 0)
    took = outcome.events[-1].time.ToNanoseconds() - outcome.events[0].time.ToNanoseconds()
    assert took < 10e9
    assert len(setup.learner.batches) == trained
    if trained:
        assert outcome.ended.export_path.endswith(f"export/policy-{trained}")
        assert setup.learner.exported == [outcome.ended.export_path]
        assert setup.ledger("SELECT max(step) FROM steps") == [(trained,)]
    else:
        assert (outcome.ended.export_path, setup.learner.exported) == ("", [])
    if phase == "GENERATE":
        async with asyncio.timeout(5.0):
            await setup.rollout.wait_aborted(PROMPTS)
    if phase in ("TRAIN", "PUBLISH") and step:
        assert setup.learner.published[-1] == (1, 2)  # what was under way was finished


async def test_a_stop_does_not_wait_for_ever_for_a_step(setup: Setup) -> None:
    setup.learner.train_delay_seconds = 100.0
    outcome = await setup.run(stop_in(events_pb2.RUN_PHASE_TRAIN, 1), stop_seconds=0.3)
    assert (outcome.ended.outcome, outcome.ended.export_path) == ("stopped", "")
    assert setup.ledger("SELECT count(*) FROM batches") == [(1,)]
    assert setup.ledger("SELECT count(*) FROM steps") == [(0,)]


async def test_sigterm_stops_the_run_and_ends_the_process(setup: Setup) -> None:
    generating = asyncio.Event()

    def hold(request: rollout_pb2.GenerateRequest) -> float:
        if request.prompt_id.dataset != "train" or request.policy_version == 0:
            return 0.0
        generating.set()
        return 100.0

    setup.rollout.delay_seconds = hold
    process = process_config(setup.folder, setup.nats, setup.run_id, settings(setup.folder))
    path = setup.folder / "coordinator.yaml"
    path.write_text(dump(process))
    command = [sys.executable, "-m", "services.coordinator", "--config", str(path)]
    with (setup.folder / "log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        async with asyncio.timeout(60.0):
            await generating.wait()
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
    text = (setup.folder / "log").read_text()
    assert "run stopped. the coordinator was told to end" in text
    assert "Traceback" not in text
    assert [path.rpartition("/")[2] for path in setup.learner.exported] == ["policy-1"]
