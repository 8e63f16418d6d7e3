"""A whole run over real channels and a real NATS server; the other services are simulated (tests/simulated) and check
what they are sent."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.digest import digest_messages
from services.common.errors import InvalidRequest
from tests.contract.coordinator.coordinator_setup import PROMPTS, SAMPLES, STEPS, Setup, digits
from tests.simulated.policy import policy

LETTERS = "abcdef0123456789"


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
