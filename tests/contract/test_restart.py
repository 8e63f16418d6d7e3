"""Services that die while the run goes on and come back empty; a coordinator that comes back to services which go on.

The services are simulated: a kill takes the server away at once, another life of it knows nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2

from services.cli.watch import Watcher
from services.common.config import dump
from tests.conftest import NatsServer
from tests.run_ledger import ledger_rows
from tests.simulated.coordinator import Live, OnEvent, Outcome, process_config, run_coordinator, settings
from tests.simulated.services import Simulation, simulated_services

STEPS, PROMPTS, SAMPLES = 3, 2, 4
ROWS = STEPS * PROMPTS * SAMPLES
DEAD_SECONDS = 0.2
ANSWERING = {"steps": STEPS, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "evaluation": None}


class Story:
    """One run; its services live on when its coordinator does not."""

    def __init__(self, folder: Path, nats: NatsServer, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self.nats = nats

    async def coordinate(self, on_event: OnEvent | None = None, **changes: Any) -> Outcome:
        config = settings(self.folder, **(ANSWERING | {"replacement_seconds": 10} | changes))
        return await run_coordinator(process_config(self.folder, self.nats, self.run_id, config), on_event)

    async def run(self, on_event: Callable[[Simulation], OnEvent], rollouts: int = 1, **changes: Any) -> Outcome:
        async with simulated_services(self.nats.url, self.run_id, rollouts=rollouts) as self.simulation:
            self.engines = {engine.worker_id: [engine] for engine in self.simulation.rollouts}
            changes = {"rollout_workers": rollouts} | changes
            return await self.coordinate(on_event(self.simulation), **changes)

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        return ledger_rows(self.folder / "run", query)

    @property
    def digests(self) -> list[tuple[int, bytes]]:
        return self.ledger("SELECT step, digest FROM batches ORDER BY step")


@pytest.fixture
def story(tmp_path: Path, nats: NatsServer, request: pytest.FixtureRequest) -> Story:
    return Story(tmp_path, nats, f"restart-{abs(hash(request.node.nodeid)) % 10**9}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> list[tuple[int, bytes]]:
    async def nothing(event: events_pb2.RunEvent, live: Live) -> None:
        pass

    whole = Story(tmp_path_factory.mktemp("whole"), nats, "restart-whole")
    outcome = asyncio.run(whole.run(lambda simulation: nothing))
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    return whole.digests


def slow(phase: str) -> Any:
    return pytest.param(phase, marks=pytest.mark.slow)


def kill_in(phase: str, step: int, *worker_ids: str, replaced: bool = True) -> Callable[[Simulation], OnEvent]:
    """Kills workers as a phase begins, and starts them again a moment later."""
    wanted = (events_pb2.RunPhase.Value(f"RUN_PHASE_{phase}"), step)

    def watch(simulation: Simulation) -> OnEvent:
        tasks = []

        async def replace(worker_id: str) -> None:
            await asyncio.sleep(DEAD_SECONDS)
            await simulation.start(worker_id)

        async def kill(event: events_pb2.RunEvent, live: Live) -> None:
            if (event.phase_changed.phase, event.phase_changed.step) == wanted and not tasks:
                for worker_id in worker_ids:
                    await simulation.kill(worker_id)
                    if replaced:
                        tasks.append(asyncio.create_task(replace(worker_id)))

        return kill

    return watch


def require_whole(story: Story, undisturbed: list[tuple[int, bytes]], outcome: Outcome) -> None:
    assert (outcome.ended.outcome, outcome.exit_code) == ("finished", 0), outcome.ended.reason
    assert story.digests == undisturbed
    assert story.ledger("SELECT count(*), count(DISTINCT trajectory_id) FROM batch_rows") == [(ROWS, ROWS)]
    assert story.ledger("SELECT step, policy_version FROM steps") == [(n, n) for n in range(1, STEPS + 1)]
    assert story.ledger("SELECT count(*) FROM scores WHERE failure IS NOT NULL") == [(0,)]
    assert [line["step"] for line in outcome.metrics if "loss" in line] == list(range(1, STEPS + 1))


def told(outcome: Outcome, text: str) -> bool:
    return any(text in notice.message for notice in outcome.of("notice"))


@pytest.mark.parametrize("phase", [slow("GENERATE"), slow("SCORE"), slow("TRAIN"), "PUBLISH"])
async def test_a_learner_that_comes_back_empty_is_brought_to_the_run(
    story: Story, undisturbed: list[tuple[int, bytes]], phase: str
) -> None:
    outcome = await story.run(kill_in(phase, 2, "learner-0"), checkpoint={"every": 1})
    require_whole(story, undisturbed, outcome)
    learner = story.simulation.learner
    assert [Path(path).name for path in learner.loaded] == ["step-1"]
    assert [header.step_id for header, _ in learner.batches] == [2, 3]  # step 2 by replay, where it was done before
    assert [version for _, version in learner.published] == [2, 3]
    assert story.simulation.rollout.sampled.most_common(1)[0][1] == 1
    assert told(outcome, "learner-0 is another life")
    assert outcome.ended.export_path.endswith(f"policy-{STEPS}")


@pytest.mark.slow
async def test_without_a_checkpoint_every_stored_batch_is_replayed(
    story: Story, undisturbed: list[tuple[int, bytes]]
) -> None:
    outcome = await story.run(kill_in("TRAIN", 3, "learner-0"))
    require_whole(story, undisturbed, outcome)
    assert [header.step_id for header, _ in story.simulation.learner.batches] == [1, 2, 3]
    assert told(outcome, "steps 1 to 3 were replayed from the ledger")


@pytest.mark.parametrize("phase", [slow(phase) for phase in ("GENERATE", "SCORE", "TRAIN", "PUBLISH")])
async def test_an_engine_that_comes_back_serves_after_a_publication(
    story: Story, undisturbed: list[tuple[int, bytes]], phase: str
) -> None:
    outcome = await story.run(kill_in(phase, 2, "rollout-0"))
    require_whole(story, undisturbed, outcome)
    versions = [commit.policy.version for commit in story.simulation.rollout.commits]
    # What was paid for is not asked of it: it is up in time for the next publication, or not.
    assert versions in {"GENERATE": [[1, 2, 3]], "SCORE": [[1, 2, 3], [2, 3]]}.get(phase, [[2, 3]])
    assert min(request.policy_version for request in story.simulation.rollout.requests) >= versions[0]


async def test_the_others_take_over_and_a_newcomer_holds_nobody_up(
    story: Story, undisturbed: list[tuple[int, bytes]]
) -> None:
    def watch(simulation: Simulation) -> OnEvent:
        survivor = simulation.rollouts[0]
        # Longer than the newcomer needs to come up: it is served beside the work of the other.
        survivor.delay_seconds = lambda request: 0.6 if request.policy_version == 1 else 0.0
        return kill_in("GENERATE", 2, "rollout-1")(simulation)

    outcome = await story.run(watch, rollouts=2)
    require_whole(story, undisturbed, outcome)
    survivor, newcomer = story.simulation.rollouts
    assert [commit.policy.version for commit in survivor.commits] == [0, 1, 2, 3]  # 1 only once: it was not disturbed
    assert [commit.policy.version for commit in newcomer.commits] == [1, 2, 3]
    assert told(outcome, "rollout-1 came up, and serves version 1")


@pytest.mark.parametrize("phase", [slow("GENERATE"), "SCORE"])
async def test_a_reward_worker_that_dies_makes_no_failure_of_a_score(
    story: Story, undisturbed: list[tuple[int, bytes]], phase: str
) -> None:
    def watch(simulation: Simulation) -> OnEvent:
        simulation.reward.delay_seconds = lambda candidate: 100.0 if simulation.learner.version == 1 else 0.0
        return kill_in(phase, 2, "reward-0")(simulation)

    outcome = await story.run(watch, score_tries=1)
    require_whole(story, undisturbed, outcome)


@pytest.mark.slow
async def test_all_at_once(story: Story, undisturbed: list[tuple[int, bytes]]) -> None:
    outcome = await story.run(kill_in("TRAIN", 2, "learner-0", "rollout-0", "reward-0"), checkpoint={"every": 1})
    require_whole(story, undisturbed, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("worker_id", ["learner-0", "rollout-0", "reward-0"])
async def test_who_does_not_come_back_is_waited_for_and_named(story: Story, worker_id: str) -> None:
    phase = "TRAIN" if worker_id == "learner-0" else "GENERATE"
    outcome = await story.run(kill_in(phase, 1, worker_id, replaced=False), replacement_seconds=0.5)
    assert outcome.ended.outcome == "failed"
    assert worker_id in outcome.ended.reason
    took = outcome.events[-1].time.ToNanoseconds() - outcome.events[0].time.ToNanoseconds()
    assert took < 15e9


async def start_coordinator(story: Story, **changes: Any) -> asyncio.subprocess.Process:
    """A real process: nothing of it is closed when it is killed."""
    config = settings(story.folder, **(ANSWERING | {"replacement_seconds": 10} | changes))
    path = story.folder / "coordinator-0.yaml"
    path.write_text(dump(process_config(story.folder, story.nats, story.run_id, config)))
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "services.coordinator", "--config", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["GENERATE", "SCORE", "TRAIN", "PUBLISH"])
async def test_a_coordinator_that_comes_back_takes_its_workers_as_they_are(
    story: Story, undisturbed: list[tuple[int, bytes]], phase: str
) -> None:
    wanted = (events_pb2.RunPhase.Value(f"RUN_PHASE_{phase}"), 2)
    (story.folder / "run").mkdir()
    watcher = Watcher(story.run_id, story.nats.url, story.nats.monitor_url, story.folder / "run" / "events.jsonl")
    async with simulated_services(story.nats.url, story.run_id) as simulation:
        # Half of the answers of Step 2 are there when it is killed, and held by the engine.
        slow = {1: 0.4}
        simulation.rollout.delay_seconds = lambda request: (
            slow.get(request.policy_version, 0.0) * (request.prompt_id.row % 2) if phase == "GENERATE" else 0.0
        )
        simulation.reward.delay_seconds = lambda candidate: 0.2 if phase == "SCORE" else 0.0
        simulation.learner.train_delay_seconds = 0.3 if phase == "TRAIN" else 0.0
        simulation.learner.publish_delay_seconds = 0.3 if phase == "PUBLISH" else 0.0
        coordinator = await start_coordinator(story)
        events: list[events_pb2.RunEvent] = []
        killed = False
        try:
            async with asyncio.timeout(60.0):
                async for event in watcher.events():
                    events.append(event)
                    if (event.phase_changed.phase, event.phase_changed.step) == wanted and not killed:
                        await asyncio.sleep(0.1)
                        coordinator.kill()
                        await coordinator.wait()
                        killed = True
                        coordinator = await start_coordinator(story)
            code = await coordinator.wait()
        finally:
            await watcher.close()
            if coordinator.returncode is None:
                coordinator.kill()
                await coordinator.wait()
    outcome = Outcome(code, events, story.folder / "run")
    require_whole(story, undisturbed, outcome)
    assert [header.step_id for header, _ in simulation.learner.batches] == [1, 2, 3]
    assert simulation.learner.loaded == []
    assert len(simulation.learner.exported) == 1
    assert [version for _, version in simulation.learner.published] == [0, 1, 2, 3]
    # What was finished was held until the ledger had it: it came again and was not sampled again.
    of_training = {key: count for key, count in simulation.rollout.sampled.items() if key[0] == "train"}
    assert set(of_training.values()) == {1}
    # Each life numbers its events from 0.
    numbers = [event.sequence for event in events]
    border = numbers.index(0, 1)
    assert numbers == [*range(border), *range(len(numbers) - border)]
