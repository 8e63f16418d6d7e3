"""Engines and learners that fail, and whom the run blames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import InvalidRequest, Overloaded, Unavailable
from tests.contract.coordinator.coordinator_setup import PROMPTS, SAMPLES, STEPS, Setup
from tests.simulated.coordinator import Live


async def test_a_generation_that_breaks_is_asked_for_again_with_the_same_request_id(setup: Setup) -> None:
    async def break_once(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_TRAIN, 1):
            setup.rollout.generate_errors = [Unavailable("the engine hiccups"), Overloaded("busy", 0.01)]

    outcome = await setup.run(break_once, steps=2)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    ids: dict[tuple[int, int], set[str]] = {}
    calls = [r for r in setup.rollout.requests if r.prompt_id.dataset == "train"]
    for request in calls:
        ids.setdefault((request.prompt_id.epoch, request.prompt_id.row), set()).add(request.request_id)
    assert len(calls) == 2 * PROMPTS + 2
    assert all(len(of_prompt) == 1 for of_prompt in ids.values())
    assert setup.ledger("SELECT count(*) FROM trajectories") == [(2 * PROMPTS * SAMPLES,)]


async def test_an_engine_that_dies_ends_the_run_within_seconds(setup: Setup) -> None:
    async def die(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_GENERATE, 2):
            await setup.simulation.announced["rollout-0"].die()

    setup.rollout.delay_seconds = lambda request: 100.0 if request.policy_version == 1 else 0.0
    outcome = await setup.run(die)
    assert (outcome.ended.outcome, outcome.exit_code) == ("failed", 1)
    assert outcome.ended.export_path.endswith("policy-1")  # the learner still answered
    took = outcome.events[-1].time.ToNanoseconds() - outcome.events[0].time.ToNanoseconds()
    assert took < 15e9


async def test_tokens_of_another_version_end_the_run(setup: Setup) -> None:
    setup.rollout.stamp_shift = 0

    def old_stamp(trajectory: trajectory_pb2.Trajectory) -> None:
        if trajectory.prompt_id.dataset == "train" and setup.learner.version == 1:
            trajectory.version_spans[0].policy_version = 0

    setup.rollout.change_trajectory = old_stamp
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    assert "expected every token to be sampled by policy version 1, got version(s) 0" in outcome.ended.reason
    assert len(setup.learner.batches) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.behavior_logprobs.pop(), "one per token"),
        (lambda t: t.loss_mask.__setitem__(0, True), "masked"),
        (lambda t: t.token_ids.__setitem__(1, 40), "token ids of the prompt"),
        (lambda t: t.behavior_logprobs.__setitem__(-1, float("nan")), "finite log-probability"),
        (lambda t: t.version_spans.pop(), "version spans over every sampled token"),
        (lambda t: setattr(t, "finish_reason", trajectory_pb2.FINISH_REASON_ABORTED), "FINISH_REASON_ABORTED"),
    ],
)
async def test_a_malformed_trajectory_is_traced_to_its_worker(
    setup: Setup, change: Callable[[trajectory_pb2.Trajectory], Any], complaint: str
) -> None:
    def break_one(trajectory: trajectory_pb2.Trajectory) -> None:
        if trajectory.prompt_id.dataset == "train" and trajectory.sample_number == 3:
            change(trajectory)

    setup.rollout.change_trajectory = break_one
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    assert complaint in outcome.ended.reason
    assert "/3 from rollout-0" in outcome.ended.reason
    assert f"see {outcome.run_dir}/logs/rollout-0.log" in outcome.ended.reason


async def test_silence_is_not_death(setup: Setup) -> None:
    async def silence(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_TRAIN, 1):
            for worker in setup.simulation.announced.values():
                await worker.fall_silent()

    setup.learner.train_delay_seconds = 0.2
    outcome = await setup.run(silence)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert len(setup.learner.batches) == STEPS


async def test_a_step_whose_answer_is_lost_is_applied_once(setup: Setup) -> None:
    setup.learner.lost_answers = 1
    outcome = await setup.run()
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert [header.step_id for header, _ in setup.learner.batches] == [1, 2, 3]


async def test_a_learner_that_dies_in_a_step_ends_the_run_within_seconds_and_is_blamed(setup: Setup) -> None:
    async def die(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_TRAIN, 2):
            await setup.simulation.announced["learner-0"].die()

    setup.learner.train_delay_seconds = 0.5
    outcome = await setup.run(die)
    assert (outcome.ended.outcome, outcome.exit_code) == ("failed", 1)
    assert "learner-0" in outcome.ended.reason
    assert f"see {outcome.run_dir}/logs/learner-0.log" in outcome.ended.reason
    assert outcome.ended.export_path == ""
    assert any("the last policy was not exported" in notice.message for notice in outcome.of("notice"))
    assert setup.ledger("SELECT max(step) FROM batches") == [(2,)]  # durable, to be sent again on resume


async def test_an_error_of_the_learner_is_the_reason(setup: Setup) -> None:
    setup.learner.train_errors = [InvalidRequest("train/0/1/2: an advantage is not finite at position 9")]
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    assert "train/0/1/2: an advantage is not finite at position 9" in outcome.ended.reason
    assert outcome.ended.export_path == ""


async def test_an_update_that_was_left_out_is_told(setup: Setup) -> None:
    setup.learner.skip_updates = True
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert any("1 Update(s) left out: the gradient was not finite" in notice.message for notice in outcome.of("notice"))
    line = next(line for line in outcome.metrics if "reward" in line)
    assert (line["updates"], line["updates_skipped"], line["loss"]) == (0.0, 1.0, None)
