"""CoordinatorService and the whole run behind it, over real channels and a real NATS server; the other services are
simulated (tests/simulated) and check what they are sent."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.config import ModelConfig, dump
from services.common.digest import digest_messages
from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded, Unavailable
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Order
from services.coordinator.identity import PromptKey
from services.coordinator.inputs import read_inputs
from tests.conftest import NatsServer
from tests.simulated.coordinator import Live, OnEvent, Outcome, process_config, run_coordinator, settings, write_rows
from tests.simulated.policy import policy
from tests.simulated.services import Simulation, simulated_services

STEPS, PROMPTS, SAMPLES = 3, 2, 4
LETTERS = "abcdef0123456789"


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for all tests of this file; each run has an id of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


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
        with sqlite3.connect(f"file:{self.folder}/run/run.db?mode=ro", uri=True) as db:
            return db.execute(query, values).fetchall()


@pytest.fixture
async def make_setup(
    tmp_path: Path, nats: NatsServer, request: pytest.FixtureRequest
) -> AsyncIterator[Callable[..., Any]]:
    stack = []

    async def make(rollouts: int = 1, **states: Any) -> Setup:
        run_id = f"run-{abs(hash(request.node.nodeid)) % 10**9}-{len(stack)}"
        services = simulated_services(nats.url, run_id, rollouts=rollouts, **states)
        simulation = await services.__aenter__()
        stack.append(services)
        return Setup(tmp_path, nats, run_id, simulation)

    yield make
    for services in stack:
        await services.__aexit__(None, None, None)


@pytest.fixture
async def setup(make_setup: Callable[..., Any]) -> Setup:
    made: Setup = await make_setup()
    return made


def digits(row: learner_pb2.TrainTrajectory) -> float:
    """The reward of a trained row, from its token ids alone: tokens 6 to 31 are a-z, 32 to 41 the digits."""
    answer = [i for i, trained in zip(row.token_ids, row.loss_mask, strict=True) if trained and i >= 6]
    return sum(32 <= i < 42 for i in answer) / len(answer) if answer else 0.0


# A whole run


async def test_a_run_of_three_steps(setup: Setup) -> None:
    ledger_at_train: list[tuple[int, list[tuple[int, bytes]], int]] = []

    def look(header: learner_pb2.StepHeader) -> None:
        batches = setup.ledger("SELECT step, digest FROM batches ORDER BY step")
        (members,) = setup.ledger("SELECT count(*) FROM batch_rows WHERE step = ?", header.step_id)[0]
        ledger_at_train.append((header.step_id, batches, members))

    setup.learner.on_train = look
    outcome = await setup.run()

    assert (outcome.exit_code, outcome.ended.outcome) == (0, "finished"), outcome.ended.reason
    step = ["generate", "score", "train", "publish"]
    assert outcome.phases == [
        "start",
        "start",
        "publish",
        "check",
        "check",
        "evaluate",
        *step * STEPS,
        "evaluate",
        "export",
    ]
    assert [event.sequence for event in outcome.events] == list(range(len(outcome.events)))
    # Before anything was sampled, a Step without effect on rows as long as they may get.
    ((warm_up, rows),) = setup.learner.dry_runs
    assert warm_up.step_id == 1 and len(warm_up.updates) == 1 and len(rows) == warm_up.trajectory_count
    longest = max(len(row.token_ids) for _, batch in setup.learner.batches for row in batch)
    assert {len(row.token_ids) >= longest for row in rows} == {True}
    assert len({tuple(row.token_ids) for row in rows}) > 1
    told = [e.notice.message for e in outcome.events if e.WhichOneof("event") == "notice"]
    assert any("warm-up with rows of" in message and "rank 0 1.00 of 16.00 GiB" in message for message in told)
    # The Batch, with its digest and rows, was durable when the learner began its Step.
    headers = [header for header, _ in setup.learner.batches]
    assert [step for step, _, _ in ledger_at_train] == [1, 2, 3]
    for number, (_, batches, members) in enumerate(ledger_at_train):
        assert batches == [(header.step_id, header.batch_digest) for header in headers[: number + 1]]
        assert members == PROMPTS * SAMPLES
    assert setup.learner.published == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert [commit.policy for commit in setup.rollout.commits] == [policy(version) for version in range(4)]
    assert outcome.ended.policy == policy(3)
    assert outcome.ended.export_path == str(outcome.run_dir.resolve() / "export" / "policy-3")
    assert (outcome.run_dir / "export" / "policy-3" / "config.json").exists()


async def test_an_engine_may_forget_what_is_durable_and_nothing_else(setup: Setup) -> None:
    lost: list[str] = []

    def look(request: rollout_pb2.AcknowledgeRequest) -> None:
        if not (setup.folder / "run" / "run.db").exists():
            return  # the self-check, which keeps nothing
        stored = {bytes(blob) for (blob,) in setup.ledger("SELECT message FROM trajectories")}
        for call in request.calls:
            for trajectory in setup.rollout.held[call.request_id].values():
                if trajectory.prompt_id.dataset == "train" and trajectory.SerializeToString() not in stored:
                    lost.append(str(trajectory.prompt_id))

    setup.rollout.on_acknowledge = look
    await setup.run()
    sampled = setup.ledger("SELECT count(*) FROM trajectories")[0][0]
    assert sampled == STEPS * PROMPTS * SAMPLES and not lost
    assert not any(setup.rollout.held.values())  # of evaluations and checks nothing is kept either
    assert sum(map(len, setup.rollout.acknowledged.values())) > sampled


async def test_an_engine_that_is_not_told_does_not_hold_the_run_up(setup: Setup) -> None:
    def refuse(request: rollout_pb2.AcknowledgeRequest) -> None:
        raise InvalidRequest("not now")

    setup.rollout.on_acknowledge = refuse
    outcome = await setup.run()
    assert outcome.ended.outcome == "finished" and any(setup.rollout.held.values())


async def test_what_the_ledger_holds_after_a_run(setup: Setup) -> None:
    await setup.run()
    groups = setup.ledger("SELECT group_id, admission, state FROM groups ORDER BY admission")
    assert [admission for _, admission, _ in groups] == list(range(STEPS * PROMPTS))
    assert {state for _, _, state in groups} == {"complete"}
    assert setup.ledger("SELECT count(*) FROM trajectories") == [(STEPS * PROMPTS * SAMPLES,)]
    assert setup.ledger("SELECT count(*), count(failure) FROM scores") == [(STEPS * PROMPTS * SAMPLES, 0)]
    assert setup.ledger("SELECT DISTINCT scorer FROM scores") == [("digits@1",)]
    assert setup.ledger("SELECT step, policy_version FROM steps ORDER BY step") == [(1, 1), (2, 2), (3, 3)]
    for step, (header, rows) in enumerate(setup.learner.batches, 1):
        (stored,) = setup.ledger("SELECT header FROM batches WHERE step = ?", step)[0]
        assert learner_pb2.StepHeader.FromString(stored) == header
        blobs = setup.ledger("SELECT message FROM batch_rows WHERE step = ? ORDER BY position", step)
        messages = [learner_pb2.TrainTrajectory.FromString(blob) for (blob,) in blobs]
        assert messages == rows
        assert digest_messages(messages) == header.batch_digest
        versions = setup.ledger(
            "SELECT DISTINCT oldest_version FROM trajectories JOIN batch_rows USING (trajectory_id) WHERE step = ?",
            step,
        )
        assert versions == [(step - 1,)]  # strictly on policy


async def test_batches_hold_the_advantages_of_their_own_rows_in_canonical_order(setup: Setup) -> None:
    outcome = await setup.run()
    seen = set()
    for step, (header, rows) in enumerate(setup.learner.batches, 1):
        ids = [row.trajectory_id for row in rows]
        assert ids == sorted(ids, key=lambda i: (i.split("/")[0], *map(int, i.split("/")[1:])))
        assert not seen & set(ids)
        seen |= set(ids)
        assert [list(update.trajectory_ids) for update in header.updates] == [ids]
        groups: dict[str, list[learner_pb2.TrainTrajectory]] = {}
        for row in rows:
            groups.setdefault(row.trajectory_id.rpartition("/")[0], []).append(row)
        assert len(groups) == PROMPTS
        rewards = []
        for members in groups.values():
            values = [digits(row) for row in members]
            rewards += values
            spread = statistics.stdev(values)
            for row, value in zip(members, values, strict=True):
                expected = 0.0 if spread == 0 else (value - statistics.fmean(values)) / (spread + 1e-6)
                for advantage, trained in zip(row.advantages, row.loss_mask, strict=True):
                    assert advantage == pytest.approx(expected if trained else 0.0, rel=1e-5, abs=1e-7)
        line = next(line for line in outcome.metrics if line["step"] == step and "reward" in line)
        assert line["reward"] == pytest.approx(statistics.fmean(rewards))
        assert line["reward_std"] == pytest.approx(statistics.stdev(rewards))
        assert line["tokens"] == sum(sum(row.loss_mask) for row in rows) == header.updates[0].token_count


async def test_metrics_and_evaluations_are_files(setup: Setup) -> None:
    outcome = await setup.run()
    lines = outcome.metrics
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    names = {
        "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "loss",
        "grad_norm", "learning_rate", "entropy", "mismatch_kl_k3", "time/generate", "time/score", "time/train",
        "time/publish", "time/step", "tokens", "publish/pause_seconds",
    }  # fmt: skip
    for line, event in zip(lines[1:4], outcome.of("step_finished"), strict=True):
        assert names <= set(line)
        assert {metric.name for metric in event.metrics} == set(line) - {"step", "time", "policy_version"}
    evaluated = outcome.of("evaluated")
    assert [(e.dataset, e.policy_version, e.prompts, e.failures) for e in evaluated] == [
        ("evaluation", 0, 3, 0),
        ("evaluation", 3, 3, 0),
    ]
    for result in evaluated:
        path = outcome.run_dir / "evaluations" / f"evaluation-v{result.policy_version}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["row"] for row in rows] == [0, 1, 2]
        assert [row["reference"] for row in rows] == ["0", "1", "2"]
        assert rows[1]["prompt"] == "<bos><user>and 1?<eos><assistant>"
        for row in rows:
            assert row["score"] == pytest.approx(sum(c.isdigit() for c in row["response"]) / len(row["response"]))
        assert result.score_mean == pytest.approx(statistics.fmean(row["score"] for row in rows))
    greedy = [request for request in setup.rollout.requests if request.prompt_id.dataset == "evaluation"]
    assert {(request.sampling.temperature, request.policy_version) for request in greedy} == {(0.0, 0), (0.0, 3)}


async def test_what_a_scorer_is_given(setup: Setup) -> None:
    await setup.run(steps=1)
    candidate = next(c for c in setup.reward.seen if c.prompt_id.dataset == "train")
    row = candidate.prompt_id.row
    assert candidate.group_size == SAMPLES
    assert [(m.role, m.content) for m in candidate.conversation.messages] == [("user", f"what is {row}?")]
    assert candidate.prompt_text == f"<bos><user>what is {row}?<eos><assistant>"
    assert candidate.reference == str(row)
    assert json.loads(candidate.columns_json) == {"level": row % 3}
    assert set(candidate.response_text) <= set(LETTERS)
    cut = candidate.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    assert candidate.response_text_raw == candidate.response_text + ("" if cut else "<eos>")
    assert len(candidate.response_token_ids) == len(candidate.response_text) + (not cut)


async def test_the_same_seed_gives_the_same_run_and_another_seed_another(make_setup: Callable[..., Any]) -> None:
    digests = []
    for seed in (1, 1, 2):
        setup = await make_setup()
        setup.folder = setup.folder / f"{len(digests)}"
        setup.folder.mkdir()
        await setup.run(seed=seed, evaluation=None)
        digests.append([header.batch_digest for header, _ in setup.learner.batches])
    assert digests[0] == digests[1] != digests[2]


async def test_mini_batches_and_epochs_are_planned_as_updates(setup: Setup) -> None:
    await setup.run(steps=1, algorithm={"epochs": 2, "mini_batches": 3})
    ((header, rows),) = setup.learner.batches
    updates = [list(update.trajectory_ids) for update in header.updates]
    assert [len(update) for update in updates] == [2, 3, 3] * 2
    everything = sorted(row.trajectory_id for row in rows)
    for epoch in (updates[:3], updates[3:]):
        assert sorted(i for update in epoch for i in update) == everything
    assert updates[:3] != updates[3:]


async def test_shuffled_rewards_are_a_control_and_said_to_be(setup: Setup) -> None:
    outcome = await setup.run(steps=2, algorithm={"control": "shuffled_rewards"})
    assert any("CONTROL EXPERIMENT shuffled_rewards" in notice.message for notice in outcome.of("notice"))
    lines = [line for line in outcome.metrics if "reward" in line]
    assert [line["control/shuffled_rewards"] for line in lines] == [1.0, 1.0]
    for line, (_, rows) in zip(lines, setup.learner.batches, strict=True):
        assert line["reward"] == pytest.approx(statistics.fmean(digits(row) for row in rows))  # the raw one
    own = []
    for _, rows in setup.learner.batches:
        mean = statistics.fmean(digits(row) for row in rows)
        for row in rows:
            advantage = next(a for a, m in zip(row.advantages, row.loss_mask, strict=True) if m)
            own.append((digits(row) - mean, advantage))
    assert any(centred * advantage < 0 for centred, advantage in own)  # some get what others earned


async def test_work_is_spread_over_the_engines(make_setup: Callable[..., Any]) -> None:
    setup = await make_setup(rollouts=2)
    outcome = await setup.run(rollout_workers=2, prompts_per_step=4)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    counts = [sum(r.prompt_id.dataset == "train" for r in engine.requests) for engine in setup.simulation.rollouts]
    assert counts == [6, 6]
    assert [len(engine.commits) for engine in setup.simulation.rollouts] == [4, 4]


# Watching and stopping


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


# Scores that fail


def failure(kind: int, reason: str) -> reward_pb2.ScoreFailure:
    return reward_pb2.ScoreFailure(kind=kind, reason=reason, message="expected a number, got a cat")


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


# Engines that fail


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


# The learner fails


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


# Publication


@pytest.mark.parametrize("where", ["begin", "publish", "commit"])
async def test_a_publication_that_breaks_is_tried_once_more_in_a_new_epoch(setup: Setup, where: str) -> None:
    error = Expired("the transfer stalled")
    {
        "begin": setup.rollout.begin_errors,
        "publish": setup.learner.publish_errors,
        "commit": setup.rollout.commit_errors,
    }[where].append(error)
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert setup.rollout.epochs == [1, 2]
    assert setup.learner.published[-2:] == [(2, 0), (2, 1)]
    assert any("the transfer stalled" in notice.message for notice in outcome.of("notice"))


async def test_a_publication_that_breaks_twice_ends_the_run_with_the_first_error(setup: Setup) -> None:
    setup.rollout.commit_errors = [Conflict("digest differs"), Conflict("it differs again")]
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "failed"
    assert "digest differs" in outcome.ended.reason
    assert "logs/rollout-0.log" in outcome.ended.reason
    assert not [request for request in setup.rollout.requests if request.prompt_id.dataset == "train"]


async def test_an_engine_that_says_it_committed_and_did_not_is_found_out(setup: Setup) -> None:
    async def drop(event: events_pb2.RunEvent, live: Live) -> None:
        if event.phase_changed.phase == events_pb2.RUN_PHASE_TRAIN:
            setup.rollout.commits_take_effect = False

    outcome = await setup.run(drop)
    assert outcome.ended.outcome == "failed"
    assert "rollout-0: expected version 1 with digest" in outcome.ended.reason
    assert "it holds version 0" in outcome.ended.reason
    assert outcome.ended.export_path.endswith("policy-1")


async def test_every_unmatched_tensor_ends_the_run_by_name(make_setup: Callable[..., Any]) -> None:
    setup = await make_setup(rollouts=2)
    first, second = setup.simulation.rollouts
    first.join_answer = rollout_pb2.JoinTransferResponse(
        unknown_tensors=["lm_head.weight"], missing_tensors=["norm.weight"]
    )
    second.join_answer = rollout_pb2.JoinTransferResponse(differing_tensors=["embed: expected [4, 4], got [4, 5]"])
    outcome = await setup.run(rollout_workers=2)
    assert outcome.ended.outcome == "failed"
    for line in (
        "differ in 3 tensor(s)",
        "rollout-0: no place for lm_head.weight",
        "rollout-0: nothing fills norm.weight",
        "rollout-1: embed: expected [4, 4], got [4, 5]",
    ):
        assert line in outcome.ended.reason
    assert first.epochs == [1]  # no second try


async def test_publication_goes_on_over_the_survivors(make_setup: Callable[..., Any]) -> None:
    setup = await make_setup(rollouts=2)

    async def die(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_TRAIN, 1):
            # As after kill -9: the server is gone, the last announcement stays for a while.
            await setup.simulation.announced["rollout-1"].server.stop(0.0)

    outcome = await setup.run(die, rollout_workers=2, steps=2)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    lines = [line for line in outcome.metrics if "publish/engines" in line]
    assert [line["publish/engines"] for line in lines] == [1.0, 1.0]
    assert len(setup.simulation.rollouts[0].commits) == 3


# The self-check, and what is checked before it


def different_for(text: str, encode: Any) -> Any:
    def wrong(messages: Any) -> list[int]:
        ids: list[int] = encode(messages)
        return [*ids[:-1], 7] if text in messages[-1]["content"] else ids

    return wrong


@pytest.mark.parametrize("worker", ["rollout", "learner"])
@pytest.mark.parametrize("text", ["naïve café", "<eos>", "Is water wet?", "what is 3?"])
async def test_other_token_ids_stop_the_run_and_name_the_conversation(setup: Setup, worker: str, text: str) -> None:
    party = setup.rollout if worker == "rollout" else setup.learner
    party.encode = different_for(text, party.encode)
    outcome = await setup.run(self_check={"prompts": 5}, prompts_per_step=5)
    assert outcome.ended.outcome == "failed"
    assert f"self-check, token ids: {worker}-0" in outcome.ended.reason
    assert text in outcome.ended.reason
    assert "coordinator [5] (" in outcome.ended.reason  # <assistant>
    assert f"{worker}-0 [7] (" in outcome.ended.reason
    assert setup.learner.batches == []


@pytest.mark.parametrize(("shift", "stops"), [(0.9e-4, False), (1.5e-4, True), (0.5, True), (float("nan"), True)])
async def test_other_logprobs_stop_the_run_and_name_prompt_and_values(setup: Setup, shift: float, stops: bool) -> None:
    setup.learner.logprob_shift = shift
    outcome = await setup.run(steps=1)
    if not stops:
        assert outcome.ended.outcome == "finished", outcome.ended.reason
        return
    assert outcome.ended.outcome == "failed"
    assert "self-check, log-probabilities (float32): mean |trainer - engine|" in outcome.ended.reason
    assert "worst at prompt train/0/" in outcome.ended.reason
    assert "engine rollout-0 -" in outcome.ended.reason
    assert "trainer learner-0 " in outcome.ended.reason
    assert setup.learner.batches == []


async def test_a_worker_that_cannot_take_the_longest_sequence_is_named(setup: Setup) -> None:
    setup.rollout.max_sequence_tokens = 15
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    # <bos> <user> "what is 0?" <eos> <assistant>: 14 tokens, and 4 more.
    assert "rollout-0: longest prompt + max_tokens = 18 tokens > its max_sequence_tokens 15" in outcome.ended.reason


async def test_a_learner_that_is_not_at_version_0_is_refused(setup: Setup) -> None:
    setup.learner.version = 4
    outcome = await setup.run()
    assert "learner-0: expected the model the run starts from, version 0; it holds version 4" in outcome.ended.reason


async def test_a_worker_that_fails_or_leaves_while_starting_is_named_at_once(make_setup: Callable[..., Any]) -> None:
    for how in ("fails", "leaves"):
        setup = await make_setup(rollout_state=tenant_pb2.WORKER_STATE_STARTING)
        setup.folder = setup.folder / how
        setup.folder.mkdir()

        async def end(event: events_pb2.RunEvent, live: Live, setup: Setup = setup, how: str = how) -> None:
            if event.WhichOneof("event") == "phase_progress":
                assert "rollout-0 (starting)" in event.phase_progress.detail
                if how == "leaves":
                    await setup.simulation.announced["rollout-0"].die()
                setup.rollout.state = tenant_pb2.WORKER_STATE_FAILED
                setup.simulation.announced["rollout-0"].changed()

        outcome = await setup.run(end)
        assert outcome.ended.outcome == "failed"
        expected = {
            "fails": "rollout-0: says it is failed",
            "leaves": "rollout-0: was starting and is not heard of any more",
        }
        assert expected[how] in outcome.ended.reason


async def test_workers_that_do_not_come_are_named_at_the_deadline(setup: Setup) -> None:
    outcome = await setup.run(rollout_workers=2, start_seconds=1.5)
    assert outcome.ended.outcome == "failed"
    assert "not all up after 2 s; waiting for 1 rollout worker(s) not heard of" in outcome.ended.reason


async def test_bad_rows_end_the_run_before_anything_is_asked(setup: Setup) -> None:
    bad = write_rows(setup.folder / "bad.jsonl", [{"prompt": "a", "reference": "b"}, {"prompt": " ", "reference": "b"}])
    outcome = await setup.run(data={"path": str(bad)})
    assert outcome.ended.outcome == "failed"
    assert "line 2, row 1, column 'prompt': expected a prompt, found ' '" in outcome.ended.reason
    assert outcome.phases == ["start"]


async def test_a_data_set_smaller_than_a_step_is_refused(setup: Setup) -> None:
    outcome = await setup.run(prompts_per_step=6)
    assert "5 rows < prompts_per_step 6; take 1 to 5 prompts per step" in outcome.ended.reason


async def test_a_run_that_was_there_is_not_overwritten(setup: Setup) -> None:
    (setup.folder / "run").mkdir()
    (setup.folder / "run" / "run.db").write_bytes(b"what was paid for")
    outcome = await setup.run()
    assert outcome.ended.outcome == "failed"
    assert "run.db exists" in outcome.ended.reason
    assert (setup.folder / "run" / "run.db").read_bytes() == b"what was paid for"


async def test_prompts_in_both_data_sets_are_told(setup: Setup) -> None:
    same = write_rows(setup.folder / "same.jsonl", [{"prompt": "what is 1?", "reference": "1"}])
    outcome = await setup.run(steps=1, evaluation={"path": str(same), "max_tokens": 2})
    assert any("1 of 1 evaluation prompts are trained on too" in notice.message for notice in outcome.of("notice"))


async def test_several_data_sets_are_trained_and_evaluated_on(setup: Setup) -> None:
    """cases.md D01, too: engine and trainer get the very ids that the row was checked with."""
    folder = setup.folder
    sums = write_rows(folder / "sums.jsonl", [{"question": f"sum {n}?", "answer": f"so\n#### {n}"} for n in range(4)])
    (folder / "words.csv").write_text("instruction,input,label\n" + "".join(f"say,w{n},{n}\n" for n in range(3)))
    easy = write_rows(folder / "easy.jsonl", [{"prompt": "e?", "reference": "1"}])
    hard = write_rows(folder / "hard.jsonl", [{"prompt": f"h{n}?", "reference": "2"} for n in range(2)])
    data = {
        "sources": [
            {"path": str(sums), "weight": 2, "answer_regex": "#### (.+)"},
            {"path": str(folder / "words.csv"), "name": "words"},
        ]
    }
    evaluation = {"sources": [{"path": str(easy)}, {"path": str(hard)}], "max_tokens": 4}
    outcome = await setup.run(data=data, evaluation=evaluation, prompts_per_step=3)
    assert outcome.ended.outcome == "finished"
    assert [(e.dataset, e.policy_version, e.prompts) for e in outcome.of("evaluated")] == [
        ("easy", 0, 1), ("hard", 0, 2), ("easy", 3, 1), ("hard", 3, 2),
    ]  # fmt: skip
    told = [notice.message for notice in outcome.of("notice")]
    assert any("prompt from 'question', reference from 'answer'" in message for message in told)
    assert any("prompt from 'instruction' and 'input', reference from 'label'" in message for message in told)

    asked = {str(PromptKey.of(r.prompt_id)): tuple(r.prompt_token_ids) for r in setup.rollout.requests}
    inputs = read_inputs(settings(folder, data=data), ModelConfig(path=str(folder / "model")))
    order = Order(*inputs.training, seed=7, shuffle=True)
    for step, (_, trajectories) in enumerate(setup.learner.batches):
        wanted = {str(key): prompt.token_ids for key, prompt in (order.at(n) for n in range(3 * step, 3 * step + 3))}
        assert sorted(name.partition("/")[0] for name in wanted) == ["sums", "sums", "words"]
        assert {t.trajectory_id.rpartition("/")[0] for t in trajectories} == set(wanted)
        for trajectory in trajectories:
            name = trajectory.trajectory_id.rpartition("/")[0]
            length = len(wanted[name])
            assert asked[name] == tuple(trajectory.token_ids[:length]) == wanted[name]
            assert list(trajectory.loss_mask) == [n >= length for n in range(len(trajectory.token_ids))]


# The process


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
