"""Scores that fail: one, too many, and the reward worker itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2

from services.common.errors import Overloaded
from tests.contract.coordinator.coordinator_setup import PROMPTS, SAMPLES, Setup, failure
from tests.simulated.coordinator import Live


async def test_an_answer_that_cannot_be_scored_is_left_out_and_named(setup: Setup) -> None:
    unscored: list[str] = []

    def score(candidate: reward_pb2.Candidate) -> Any:
        p = candidate.prompt_id
        if p.dataset == "train" and candidate.sample_number == 2 and not unscored:
            unscored.append(f"{p.dataset}/{p.epoch}/{p.row}/2")
        if f"{p.dataset}/{p.epoch}/{p.row}/{candidate.sample_number}" in unscored:
            return failure(reward_pb2.FAILURE_KIND_DATA, "exception")
        return float(candidate.sample_number)

    setup.reward.score = score
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    ((header, rows),) = setup.learner.batches
    assert len(rows) == header.trajectory_count == PROMPTS * SAMPLES - 1
    assert unscored[0] not in [row.trajectory_id for row in rows]
    (notice,) = [n for n in outcome.of("notice") if n.level == "warning"]
    assert "1 of 8 trajectories could not be scored" in notice.message
    assert f"{unscored[0]}: data, exception: expected a number, got a cat" in notice.message
    assert setup.ledger("SELECT value, failure FROM scores WHERE trajectory_id = ?", unscored[0]) == [
        (None, "FAILURE_KIND_DATA: exception")
    ]
    # Its siblings scored 0, 1 and 3: mean 4/3, unbiased std 1.527525; it has no share in either.
    survivors = [row for row in rows if row.trajectory_id.rpartition("/")[0] == unscored[0].rpartition("/")[0]]
    advantages = [next(a for a, m in zip(row.advantages, row.loss_mask, strict=True) if m) for row in survivors]
    assert advantages == pytest.approx([-0.872872, -0.218218, 1.091089], abs=1e-5)
    line = next(line for line in outcome.metrics if "reward" in line)
    assert line["score_failures"] == 1.0
    assert line["reward"] == pytest.approx((0 + 1 + 3 + 0 + 1 + 2 + 3) / 7)


async def test_a_failure_of_the_machinery_is_retried_and_leaves_no_trace(setup: Setup) -> None:
    failed: set[tuple[int, int]] = set()

    def score(candidate: reward_pb2.Candidate) -> Any:
        identity = (candidate.prompt_id.row, candidate.sample_number)
        if candidate.prompt_id.dataset == "train" and candidate.sample_number == 1 and identity not in failed:
            failed.add(identity)
            return failure(reward_pb2.FAILURE_KIND_INFRA, "killed")
        return float(candidate.sample_number)

    setup.reward.score = score
    setup.reward.stream_errors = [Overloaded("busy", 0.01)]
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert len(failed) == PROMPTS
    assert len(setup.learner.batches[0][1]) == PROMPTS * SAMPLES
    assert setup.ledger("SELECT count(failure) FROM scores") == [(0,)]


@pytest.mark.parametrize(
    ("outcome_of_row", "reason"),
    [
        (failure(reward_pb2.FAILURE_KIND_DATA, "timeout"), "data, timeout: expected a number, got a cat"),
        (failure(reward_pb2.FAILURE_KIND_INFRA, "killed"), "infra, killed: expected a number, got a cat"),
        (float("nan"), "data, not_finite: expected a finite score, got nan"),
        (float("inf"), "data, not_finite: expected a finite score, got inf"),
    ],
)
async def test_more_failures_than_the_budget_end_the_run(setup: Setup, outcome_of_row: Any, reason: str) -> None:
    def score(candidate: reward_pb2.Candidate) -> Any:
        fails = candidate.prompt_id.dataset == "train" and candidate.sample_number < 2
        return outcome_of_row if fails else 1.0

    setup.reward.score = score
    outcome = await setup.run(score_tries=2)
    assert (outcome.ended.outcome, outcome.exit_code) == ("failed", 1)
    assert "4 of 8 trajectories could not be scored" in outcome.ended.reason
    assert reason in outcome.ended.reason
    assert "failure_budget allows 20%" in outcome.ended.reason
    assert setup.learner.batches == []


@pytest.mark.parametrize(("budget", "outcome_wanted"), [(0.5, "finished"), (0.2, "failed")])
async def test_an_evaluation_counts_its_failures_and_has_a_budget(
    setup: Setup, budget: float, outcome_wanted: str
) -> None:
    def score(candidate: reward_pb2.Candidate) -> Any:
        if candidate.prompt_id.dataset == "evaluation" and candidate.prompt_id.row == 1:
            return failure(reward_pb2.FAILURE_KIND_DATA, "none")
        return float(candidate.prompt_id.row)

    setup.reward.score = score
    outcome = await setup.run(steps=1, failure_budget=budget)
    assert outcome.ended.outcome == outcome_wanted, outcome.ended.reason
    path = outcome.run_dir / "evaluations" / "evaluation-v0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.0, None, 2.0]
    assert rows[1]["failure"] == "evaluation/0/1/0: data, none: expected a number, got a cat"
    if outcome_wanted == "failed":
        assert "1 of 3 answers could not be scored, more than failure_budget 0.2" in outcome.ended.reason
    else:
        assert [(e.score_mean, e.prompts, e.failures) for e in outcome.of("evaluated")] == [(1.0, 3, 1)] * 2


async def test_a_reward_worker_that_dies_ends_the_run_within_seconds(setup: Setup) -> None:
    async def die(event: events_pb2.RunEvent, live: Live) -> None:
        if event.phase_changed.phase == events_pb2.RUN_PHASE_GENERATE:
            await setup.simulation.announced["reward-0"].die()

    setup.rollout.delay_seconds = lambda request: 0.2 if request.prompt_id.dataset == "train" else 0.0
    outcome = await setup.run(die)
    assert outcome.ended.outcome == "failed"
    assert "8 of 8 trajectories could not be scored" in outcome.ended.reason
    assert "infra, unanswered" in outcome.ended.reason


async def test_another_scorer_version_is_refused(setup: Setup) -> None:
    async def change(event: events_pb2.RunEvent, live: Live) -> None:
        if event.phase_changed.phase == events_pb2.RUN_PHASE_CHECK:
            setup.reward.version = "2"

    outcome = await setup.run(change)
    assert outcome.ended.outcome == "failed"
    assert "no scorer digits@1" in outcome.ended.reason


async def test_a_scorer_that_is_not_there_is_named_with_those_that_are(setup: Setup) -> None:
    outcome = await setup.run(scorer="letters")
    assert outcome.ended.outcome == "failed"
    assert "scorer 'letters': reward-0 has 0 of that name; it has: digits@1" in outcome.ended.reason
    assert outcome.phases == ["start", "start"]
