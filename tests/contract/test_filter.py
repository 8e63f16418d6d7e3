"""Runs whose groups are filtered and replaced, with the three services simulated; stopped and taken up again, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2

from tests.conftest import NatsServer
from tests.run_ledger import ledger_rows
from tests.simulated.coordinator import Live, OnEvent, Outcome, process_config, run_coordinator, settings
from tests.simulated.services import Simulation, simulated_services

STEPS, PROMPTS = 3, 2
Score = Callable[[reward_pb2.Candidate], float | reward_pb2.ScoreFailure]


def odd_rows_differ(candidate: reward_pb2.Candidate) -> float:
    """Groups of odd rows have a spread, the others none."""
    return float(candidate.sample_number) if candidate.prompt_id.row % 2 else 1.0


class Story:
    """One run in one life or several, in one folder."""

    def __init__(self, folder: Path, nats: NatsServer, run_id: str) -> None:
        self.folder, self._nats, self._run_id = folder, nats, run_id
        self.lives: list[Simulation] = []

    async def live(
        self,
        score: Score = odd_rows_differ,
        on_event: OnEvent | None = None,
        filter_: dict[str, Any] | None = None,
        slow: Callable[[reward_pb2.Candidate], float] | None = None,
        **changes: Any,
    ) -> Outcome:
        own = {"steps": STEPS, "prompts_per_step": PROMPTS, "evaluation": None, "filter": filter_ or {"type": "spread"}}
        config = settings(self.folder, **(own | changes))
        async with simulated_services(self._nats.url, self._run_id) as simulation:
            self.lives.append(simulation)
            simulation.reward.score = score
            if slow is not None:
                simulation.reward.delay_seconds = slow
            return await run_coordinator(process_config(self.folder, self._nats, self._run_id, config), on_event)

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        return ledger_rows(self.folder / "run", query)

    @property
    def admitted(self) -> list[tuple[int, int, str]]:
        """(row, epoch, state) in admission order."""
        return self.ledger("SELECT row, epoch, state FROM groups ORDER BY admission")

    @property
    def trained(self) -> list[tuple[int, int, int]]:
        """(step, row, epoch) of the groups in Batches, in admission order."""
        return self.ledger(
            "SELECT DISTINCT step, row, epoch FROM batch_rows JOIN trajectories USING (trajectory_id) "
            "JOIN groups USING (group_id) ORDER BY admission"
        )

    @property
    def digests(self) -> list[tuple[int, bytes]]:
        return self.ledger("SELECT step, digest FROM batches ORDER BY step")


@pytest.fixture
def story(tmp_path: Path, nats: NatsServer, request: pytest.FixtureRequest) -> Story:
    return Story(tmp_path, nats, f"filter-{abs(hash(request.node.nodeid)) % 10**9}")


async def test_filtered_groups_are_replaced_and_never_trained(story: Story) -> None:
    outcome = await story.live()
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    # Rows 0 to 4, in an order of their own in each epoch: the odd ones are trained, as they come.
    order = [(row, epoch) for row, epoch, _ in story.admitted]
    assert {state for row, _, state in story.admitted if row % 2} == {"complete"}
    assert {state for row, _, state in story.admitted if not row % 2} == {"filtered"}
    odd = [place for place in order if place[0] % 2][: STEPS * PROMPTS]
    assert [(row, epoch) for _, row, epoch in story.trained] == odd
    assert [step for step, _, _ in story.trained] == [1 + n // PROMPTS for n in range(STEPS * PROMPTS)]
    assert order[-1] == odd[-1], "no prompt was sampled for nothing"
    assert story.ledger("SELECT count(*) FROM trajectories") == [(4 * len(order),)]
    ends = [order.index(odd[PROMPTS * step + 1]) + 1 for step in range(STEPS)]
    assert story.ledger("SELECT next_admission FROM batches ORDER BY step") == [(end,) for end in ends]
    for line, begin, end in zip(outcome.metrics, [0, *ends], ends, strict=False):
        sampled = end - begin
        assert line["filter/prompts_sampled"] == sampled
        assert line["filter/filtered_share"] == pytest.approx((sampled - PROMPTS) / sampled)
        assert line["filter/groups_trained"] == PROMPTS
        assert line["trajectories"] == 4 * sampled and line["trajectories_trained"] == 4 * PROMPTS
        assert line["frac_reward_zero_std"] == pytest.approx((sampled - PROMPTS) / sampled)
        # 0, 1, 2, 3 in a trained group, four times 1 in a filtered one: every sampled answer counts.
        assert line["reward"] == pytest.approx((6 * PROMPTS + 4 * (sampled - PROMPTS)) / (4 * sampled))


async def test_a_filter_that_takes_nothing_out_changes_nothing(story: Story, tmp_path: Path, nats: NatsServer) -> None:
    outcome = await story.live(lambda candidate: float(candidate.sample_number))
    (tmp_path / "plain").mkdir()
    plain = Story(tmp_path / "plain", nats, "filter-plain")
    other = await plain.live(lambda candidate: float(candidate.sample_number), filter=None)
    assert (outcome.ended.outcome, other.ended.outcome) == ("finished", "finished")
    assert story.digests == plain.digests and story.admitted == plain.admitted
    assert "filter/prompts_sampled" not in other.metrics[0] and outcome.metrics[0]["filter/filtered_share"] == 0.0


@pytest.mark.parametrize("when_exhausted", ["train", "fail"])
async def test_at_the_bound_a_step_trains_on_what_it_has_or_the_run_ends(story: Story, when_exhausted: str) -> None:
    """cases.md D10: what was kept is trained, not thrown away; or it is said that it is not."""

    def one_row(candidate: reward_pb2.Candidate) -> float:
        return float(candidate.sample_number) if candidate.prompt_id.row == 1 else 1.0

    limits = {"type": "spread", "most_extra_prompts": 3, "when_exhausted": when_exhausted}
    outcome = await story.live(one_row, filter_=limits, steps=2)  # a Step is five prompts: one epoch
    if when_exhausted == "fail":
        assert outcome.ended.outcome == "failed"
        assert "step 1: 1 of 2 groups are left of 5 prompts" in outcome.ended.reason
        assert "filter.most_extra_prompts" in outcome.ended.reason
        assert story.trained == []
        return
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert story.trained == [(1, 1, 0), (2, 1, 1)] and len(story.admitted) == 10
    assert story.ledger("SELECT next_admission FROM batches ORDER BY step") == [(5,), (10,)]
    warnings = [notice.message for notice in outcome.of("notice") if notice.level == "warning"]
    assert [text.split(":")[0] for text in warnings if "The Step trains on these" in text] == ["step 1", "step 2"]
    assert [line["filter/groups_trained"] for line in outcome.metrics] == [1.0, 1.0]


async def test_a_data_set_whose_every_group_is_filtered_ends_with_the_reason(story: Story) -> None:
    """cases.md D05."""
    outcome = await story.live(lambda candidate: 1.0)
    assert outcome.ended.outcome == "failed"
    for part in ("step 1: 0 of 2 groups are left of 10 prompts", "1 to 1", "neither too easy nor too hard"):
        assert part in outcome.ended.reason
    assert {state for _, _, state in story.admitted} == {"filtered"} and story.digests == []


async def test_groups_that_cannot_be_scored_are_replaced_within_the_budget(story: Story) -> None:
    def fails_on_3(candidate: reward_pb2.Candidate) -> float | reward_pb2.ScoreFailure:
        if candidate.prompt_id.row == 3:
            return reward_pb2.ScoreFailure(kind=reward_pb2.FAILURE_KIND_DATA, reason="raised", message="3")
        return float(candidate.sample_number)

    outcome = await story.live(fails_on_3, failure_budget=0.4)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert [step for step, row, _ in story.trained if row != 3] == [1 + n // PROMPTS for n in range(STEPS * PROMPTS)]
    assert {state for row, _, state in story.admitted if row == 3} == {"failed"}


def stop_in(phase: str, step: int, nth: int = 1) -> OnEvent:
    wanted = (events_pb2.RunPhase.Value(f"RUN_PHASE_{phase}"), step)
    seen = 0

    async def stop(event: events_pb2.RunEvent, live: Live) -> None:
        nonlocal seen
        if (event.phase_changed.phase, event.phase_changed.step) == wanted:
            seen += 1
            if seen == nth:
                await live.stop_run("enough")

    return stop


@pytest.mark.parametrize(("phase", "step", "nth"), [("GENERATE", 2, 2), ("TRAIN", 2, 1)])
async def test_a_run_that_is_taken_up_goes_on_with_what_it_had_filtered(
    story: Story, nats: NatsServer, phase: str, step: int, nth: int
) -> None:
    def hardly(candidate: reward_pb2.Candidate) -> float:
        return float(candidate.sample_number) if candidate.prompt_id.row in (1, 3) else 0.5

    (story.folder / "whole").mkdir()
    whole = Story(story.folder / "whole", nats, f"filter-whole-{phase.lower()}")
    assert (await whole.live(hardly)).ended.outcome == "finished"
    stopped = await story.live(hardly, stop_in(phase, step, nth))
    assert stopped.ended.outcome == "stopped", stopped.ended.reason
    known = dict(story.ledger("SELECT group_id, state FROM groups"))
    assert "filtered" in known.values() and len(known) < len(whole.admitted)
    resumed = await story.live(hardly)
    assert resumed.ended.outcome == "finished", resumed.ended.reason
    assert story.digests == whole.digests and story.admitted == whole.admitted
    ids = [request.prompt_id for request in story.lives[1].rollout.requests]
    asked = {f"{one.dataset}/{one.epoch}/{one.row}" for one in ids}
    assert not asked & {group for group, state in known.items() if state in ("filtered", "complete")}
    sampled = [line["filter/prompts_sampled"] for line in resumed.metrics if "loss" in line]
    assert sum(sampled) == len(whole.admitted)


async def test_another_filter_does_not_take_the_run_up(story: Story) -> None:
    await story.live(on_event=stop_in("GENERATE", 2, 2))
    outcome = await story.live(filter_={"type": "mean", "above": 0.5, "below": 1.5})
    assert outcome.ended.outcome == "failed" and "coordinator.filter was changed" in outcome.ended.reason
