"""One run over two engines and two reward workers, simulated: work is spread, and the ledger is that of one of each."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from antiphon.learner.v1 import learner_pb2

from services.common.errors import Unavailable
from tests.conftest import NatsServer
from tests.run_ledger import ledger_rows
from tests.simulated.coordinator import Outcome, process_config, run_coordinator, settings
from tests.simulated.services import Simulation, simulated_services

STEPS, PROMPTS, SAMPLES = 3, 4, 4


async def run(folder: Path, nats: NatsServer, replicas: int, prepare: Any = None) -> tuple[Outcome, Simulation]:
    workers = {"rollout_workers": replicas, "reward_workers": replicas}
    changes = {"prompts_per_step": PROMPTS, "filter": {"type": "spread"}, **workers}
    run_id = f"replicas-{abs(hash(str(folder))) % 10**9}"
    async with simulated_services(nats.url, run_id, rollouts=replicas, rewards=replicas) as simulation:
        if prepare is not None:
            prepare(simulation)
        outcome = await run_coordinator(process_config(folder, nats, run_id, settings(folder, **changes)))
    return outcome, simulation


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def ledger(folder: Path, query: str) -> list[tuple[Any, ...]]:
    return ledger_rows(folder / "run", query)


def whole(folder: Path) -> list[list[tuple[Any, ...]]]:
    """What the ledger says of a run, by id."""
    return [
        ledger(folder, "SELECT group_id, admission, state FROM groups ORDER BY admission"),
        ledger(folder, "SELECT trajectory_id, value FROM scores ORDER BY trajectory_id"),
        ledger(folder, "SELECT step, digest, next_admission FROM batches ORDER BY step"),
        ledger(folder, "SELECT step, policy_version FROM steps ORDER BY step"),
    ]


async def test_two_of_each_do_the_work_of_one_and_share_it(tmp_path: Path, nats: NatsServer) -> None:
    alone, _ = await run(folder_of(tmp_path, "one"), nats, 1)
    outcome, simulation = await run(folder_of(tmp_path, "two"), nats, 2)
    for ended in (alone.ended, outcome.ended):
        assert ended.outcome == "finished", ended.reason
    # The answer to (prompt, sample, version) is the same wherever it is sampled, so the runs are the same.
    assert whole(tmp_path / "two") == whole(tmp_path / "one")
    # A group is sampled by one engine, whole, and each group once.
    groups: dict[tuple[str, int, int], list[str]] = collections.defaultdict(list)
    for engine in simulation.rollouts:
        for request in engine.requests:
            if request.prompt_id.dataset == "train":
                assert request.samples == SAMPLES
                groups[(request.prompt_id.dataset, request.prompt_id.epoch, request.prompt_id.row)].append(
                    engine.worker_id
                )
    assert len(groups) == len(ledger(tmp_path / "two", "SELECT * FROM groups"))
    assert {len(engines) for engines in groups.values()} == {1}
    # Both had work, of training and of evaluation alike, and nobody more than a Step's difference.
    for dataset in ("train", "evaluation"):
        shares = [sum(r.prompt_id.dataset == dataset for r in engine.requests) for engine in simulation.rollouts]
        assert min(shares) > 0 and max(shares) - min(shares) <= STEPS, (dataset, shares)
    # Scores: a group by one worker, and both had some.
    scored = [{(c.prompt_id.dataset, c.prompt_id.epoch, c.prompt_id.row) for c in w.seen} for w in simulation.rewards]
    assert all(scored) and not {key for key in scored[0] & scored[1] if key[0] == "train"}
    # Every policy reached both engines, verified; what they sampled was acknowledged to the one that did.
    assert [[c.policy.version for c in e.commits] for e in simulation.rollouts] == [list(range(STEPS + 1))] * 2
    assert all(not any(engine.held.values()) for engine in simulation.rollouts)
    assert [line["publish/engines"] for line in outcome.metrics if "loss" in line] == [2.0] * STEPS


async def test_a_replica_that_refuses_leaves_the_run_as_it_was(tmp_path: Path, nats: NatsServer) -> None:
    def refuse(simulation: Simulation) -> None:
        def in_step_2(header: learner_pb2.StepHeader) -> None:
            if header.step_id == 1:
                simulation.rollouts[1].generate_errors = [Unavailable("engine is gone")] * 2  # in the middle of a call
                simulation.rewards[1].stream_errors = [Unavailable("not now")] * 2

        simulation.learner.on_train = in_step_2

    await run(folder_of(tmp_path, "one"), nats, 1)
    outcome, simulation = await run(folder_of(tmp_path, "two"), nats, 2, refuse)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert simulation.rollouts[1].generate_errors == simulation.rewards[1].stream_errors == []
    assert whole(tmp_path / "two") == whole(tmp_path / "one")


async def test_one_engine_of_two_that_computes_otherwise_is_found_and_named(tmp_path: Path, nats: NatsServer) -> None:
    def shift(simulation: Simulation) -> None:
        simulation.rollouts[1].logprob_shift = -1.5e-4  # its own mean is above 1e-4, that of both is not

    outcome, _ = await run(folder_of(tmp_path, "two"), nats, 2, shift)
    assert outcome.ended.outcome == "failed"
    assert "mean |trainer - engine| 0.00015" in outcome.ended.reason and "engine rollout-1" in outcome.ended.reason
