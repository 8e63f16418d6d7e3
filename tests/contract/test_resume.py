"""A run that is taken up again, with the three services simulated and their lives ended in between."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2

from services.common.errors import Unavailable
from tests.conftest import NatsServer
from tests.run_ledger import ledger_rows
from tests.simulated.coordinator import Live, OnEvent, Outcome, process_config, run_coordinator, settings, write_rows
from tests.simulated.services import Simulation, simulated_services

STEPS, PROMPTS, SAMPLES = 5, 2, 4
PER_STEP = {"steps": STEPS, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "evaluation": None}


class Story:
    """One run in several lives: each has services of its own, which know nothing of those before."""

    def __init__(self, folder: Path, nats: NatsServer, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self.lives: list[Simulation] = []
        self._nats = nats

    async def live(
        self, on_event: OnEvent | None = None, prepare: Any = None, seed: int = 7, **changes: Any
    ) -> Outcome:
        config = settings(self.folder, **(PER_STEP | changes))
        async with simulated_services(self._nats.url, self.run_id) as simulation:
            self.lives.append(simulation)
            if prepare is not None:
                prepare(simulation)
            return await run_coordinator(process_config(self.folder, self._nats, self.run_id, config, seed), on_event)

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        return ledger_rows(self.folder / "run", query)

    @property
    def digests(self) -> list[tuple[int, bytes]]:
        """Of each Batch: which trajectories, tokens and advantages were trained in which Step."""
        return self.ledger("SELECT step, digest FROM batches ORDER BY step")

    def trained(self, life: int) -> list[int]:
        return [header.step_id for header, _ in self.lives[life].learner.batches]

    def generated(self, life: int) -> list[tuple[int, int]]:
        """(epoch, row) of the training prompts that engines were asked for."""
        ids = [request.prompt_id for request in self.lives[life].rollout.requests]
        return [(one.epoch, one.row) for one in ids if one.dataset == "train"]

    def admitted(self, first: int, last: int) -> list[tuple[int, int]]:
        """(epoch, row) of the prompts of these Steps, by the ledger."""
        rows = self.ledger("SELECT epoch, row FROM groups ORDER BY admission")
        return rows[(first - 1) * PROMPTS : last * PROMPTS]


@pytest.fixture
def story(tmp_path: Path, nats: NatsServer, request: pytest.FixtureRequest) -> Story:
    return Story(tmp_path, nats, f"resume-{abs(hash(request.node.nodeid)) % 10**9}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> list[tuple[int, bytes]]:
    whole = Story(tmp_path_factory.mktemp("whole"), nats, "resume-whole")
    outcome = asyncio.run(whole.live())
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert [step for step, _ in whole.digests] == list(range(1, STEPS + 1))
    return whole.digests


def stop_in(phase: str, step: int) -> OnEvent:
    wanted = (events_pb2.RunPhase.Value(f"RUN_PHASE_{phase}"), step)

    async def stop(event: events_pb2.RunEvent, live: Live) -> None:
        if (event.phase_changed.phase, event.phase_changed.step) == wanted:
            await live.stop_run("enough")

    return stop


def require_whole(story: Story, uninterrupted: list[tuple[int, bytes]], last: Outcome) -> None:
    """The run came to the same end as one that nothing stopped, and trained nothing twice."""
    assert (last.ended.outcome, last.exit_code) == ("finished", 0), last.ended.reason
    assert story.digests == uninterrupted
    assert story.ledger("SELECT count(*), count(DISTINCT trajectory_id) FROM batch_rows") == [(40, 40)]
    assert story.ledger("SELECT step, policy_version FROM steps") == [(n, n) for n in range(1, STEPS + 1)]
    assert [line["step"] for line in last.metrics if "loss" in line] == list(range(1, STEPS + 1))
    assert last.ended.export_path.endswith(f"policy-{STEPS}")


@pytest.mark.parametrize(
    ("phase", "step", "done"), [("GENERATE", 1, 0), ("GENERATE", 3, 2), ("TRAIN", 2, 2), ("PUBLISH", 3, 3)]
)
async def test_stopped_and_taken_up_is_the_same_run(
    story: Story, uninterrupted: list[tuple[int, bytes]], phase: str, step: int, done: int
) -> None:
    def slow(simulation: Simulation) -> None:
        simulation.rollout.delay_seconds = lambda request: (
            100.0 if phase == "GENERATE" and request.policy_version == step - 1 and request.prompt_id.dataset == "train"
            else 0.0
        )  # fmt: skip

    first = await story.live(stop_in(phase, step), slow)
    assert first.ended.outcome == "stopped"
    assert story.trained(0) == list(range(1, done + 1))
    assert [Path(path).name for path in story.lives[0].learner.saved] == ([f"step-{done}"] if done else [])
    second = await story.live()
    require_whole(story, uninterrupted, second)
    assert story.trained(1) == list(range(done + 1, STEPS + 1))  # loaded, not replayed
    assert sorted(story.generated(1)) == sorted(story.admitted(done + 1, STEPS))
    epochs = [{epoch for epoch, _ in life.learner.published} for life in story.lives]
    assert epochs == [{1}, {2}]
    steps = [change.step for change in second.of("phase_changed")][1:]
    assert steps[1:] == sorted(steps[1:]) and steps[-1] == STEPS


async def test_what_was_trained_after_the_checkpoint_is_replayed_and_not_generated(
    story: Story, uninterrupted: list[tuple[int, bytes]]
) -> None:
    checkpoint = {"every": 2, "at_stop": False}
    await story.live(stop_in("PUBLISH", 3), checkpoint=checkpoint)
    assert story.ledger("SELECT step FROM checkpoints") == [(2,)]
    second = await story.live(checkpoint=checkpoint)
    require_whole(story, uninterrupted, second)
    assert [Path(path).name for path in story.lives[1].learner.loaded] == ["step-2"]
    assert story.trained(1) == [3, 4, 5]
    assert sorted(story.generated(1)) == sorted(story.admitted(4, 5))
    assert story.lives[1].learner.batches[0] == story.lives[0].learner.batches[2]
    assert any("steps 3 to 3 were replayed" in notice.message for notice in second.of("notice"))


@pytest.mark.parametrize(("broken", "loaded"), [(("step-2",), 1), (("step-1", "step-2"), 0)])
async def test_a_broken_checkpoint_is_named_and_an_older_one_or_none_is_taken(
    story: Story, uninterrupted: list[tuple[int, bytes]], broken: tuple[str, ...], loaded: int
) -> None:
    await story.live(stop_in("PUBLISH", 3), checkpoint={"every": 1, "at_stop": False})
    for name in broken:
        shutil.rmtree(story.folder / "run" / "checkpoints" / name)
    second = await story.live()
    require_whole(story, uninterrupted, second)
    assert story.trained(1) == list(range(loaded + 1, STEPS + 1))
    warnings = [notice.message for notice in second.of("notice") if notice.level == "warning"]
    assert [name for name in reversed(broken) if any(name in text for text in warnings)] == list(reversed(broken))


async def test_a_batch_that_was_stored_and_never_answered_is_trained_once(
    story: Story, uninterrupted: list[tuple[int, bytes]]
) -> None:
    def slow_at_2(simulation: Simulation) -> None:
        def at(header: learner_pb2.StepHeader) -> None:
            simulation.learner.train_delay_seconds = 100.0 if header.step_id == 2 else 0.0

        simulation.learner.on_train = at

    await story.live(stop_in("TRAIN", 2), slow_at_2, stop_seconds=0.3)
    assert (len(story.digests), story.ledger("SELECT max(step) FROM steps")) == (2, [(1,)])
    second = await story.live()
    require_whole(story, uninterrupted, second)
    assert sorted(story.generated(1)) == sorted(story.admitted(3, 5))


async def test_answers_that_were_paid_for_are_scored_and_not_sampled_again(
    story: Story, uninterrupted: list[tuple[int, bytes]]
) -> None:
    def slow(simulation: Simulation) -> None:
        def seconds(candidate: reward_pb2.Candidate) -> float:
            return 100.0 if simulation.learner.version == 1 and candidate.prompt_id.dataset == "train" else 0.0

        simulation.reward.delay_seconds = seconds

    await story.live(stop_in("SCORE", 2), slow)
    assert story.ledger("SELECT count(*) FROM trajectories") == [(16,)]
    second = await story.live()
    require_whole(story, uninterrupted, second)
    assert sorted(story.generated(1)) == sorted(story.admitted(3, 5))


async def test_a_run_may_be_stopped_twice_at_one_place_and_be_made_longer(story: Story) -> None:
    await story.live(stop_in("TRAIN", 2))
    again = await story.live(stop_in("PUBLISH", 2))
    assert (again.ended.outcome, again.ended.export_path[-8:]) == ("stopped", "policy-2")
    assert [notice.message for notice in again.of("notice") if notice.level == "error"] == []
    assert (await story.live()).ended.outcome == "finished"
    longer = await story.live(steps=STEPS + 1)
    assert longer.ended.outcome == "finished", longer.ended.reason
    assert story.trained(3) == list(range(3, STEPS + 2))  # from the stop's checkpoint on


async def test_the_newest_and_the_best_checkpoints_are_kept(story: Story) -> None:
    def falling(simulation: Simulation) -> None:
        simulation.reward.score = lambda candidate: (
            10.0 - simulation.learner.version
            if candidate.prompt_id.dataset == "held"
            else float(candidate.sample_number)
        )

    heldout = write_rows(story.folder / "held.jsonl", [{"prompt": "and 1?", "reference": "1"}])
    evaluation = {"path": str(heldout), "name": "held", "max_tokens": 4, "every": 1}
    outcome = await story.live(
        None, falling, evaluation=evaluation, checkpoint={"every": 1, "keep_last": 2, "keep_best": 1}
    )
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    kept = sorted(path.name for path in (story.folder / "run" / "checkpoints").iterdir())
    assert kept == ["step-1", "step-4", "step-5"]
    assert story.ledger("SELECT step FROM checkpoints ORDER BY step") == [(1,), (4,), (5,)]


async def test_a_checkpoint_that_cannot_be_written_is_told_and_costs_nothing(
    story: Story, uninterrupted: list[tuple[int, bytes]]
) -> None:
    def full(simulation: Simulation) -> None:
        simulation.learner.save_errors = [Unavailable("no space left on device")] * 20

    outcome = await story.live(None, full, checkpoint={"every": 4})
    require_whole(story, uninterrupted, outcome)
    assert story.ledger("SELECT count(*) FROM checkpoints") == [(0,)]
    assert any("no checkpoint of step 4" in notice.message for notice in outcome.of("notice"))


async def test_a_line_of_metrics_that_a_kill_lost_or_cut_is_written_by_the_replay(
    story: Story, uninterrupted: list[tuple[int, bytes]]
) -> None:
    await story.live(stop_in("PUBLISH", 3), checkpoint={"at_stop": False})
    path = story.folder / "run" / "metrics.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:2]) + "\n" + whole[2][:30])
    second = await story.live()
    require_whole(story, uninterrupted, second)
    assert {"loss", "grad_norm"} <= set(json.loads(path.read_text().splitlines()[2]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 8}, "with seed 7 has been here"),
        ({"prompts_per_step": 3}, "prompts_per_step"),
        ({"samples_per_prompt": 5}, "data, template or sizes were changed"),
        ({"steps": 1}, "2 are trained already"),
        ({"data": "other"}, "data, template or sizes were changed"),
    ],
)
async def test_another_run_is_not_gone_on_with(story: Story, changes: dict[str, Any], reason: str) -> None:
    await story.live(stop_in("TRAIN", 2))
    if "data" in changes:
        rows = [{"prompt": f"how much is {n}?", "reference": str(n)} for n in range(5)]
        changes = {"data": {"path": str(write_rows(story.folder / "other.jsonl", rows)), "name": "train"}}
    outcome = await story.live(**changes)
    assert outcome.ended.outcome == "failed"
    assert reason in outcome.ended.reason
    assert story.trained(1) == [] and story.ledger("SELECT count(*) FROM batches") == [(2,)]
