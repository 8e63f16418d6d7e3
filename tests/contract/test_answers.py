"""The coordinator that only answers held-out prompts, over real channels in front of simulated services."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from services.coordinator import answers
from services.coordinator.config import AnswersConfig
from tests.conftest import NatsServer
from tests.simulated.coordinator import Outcome, process_config, run_coordinator, settings
from tests.simulated.services import simulated_services


async def answered(folder: Path, nats: NatsServer, *, score: bool, **evaluation: Any) -> tuple[Outcome, Any]:
    run_id = f"answers-{int(score)}"
    config = settings(folder)
    assert config.evaluation is not None
    (folder / "training.jsonl").unlink()  # nothing is trained
    tree = config.model_dump() | {"score": score, "evaluation": config.evaluation.model_dump() | evaluation}
    async with simulated_services(nats.url, run_id) as simulation:
        process = process_config(folder, nats, run_id, AnswersConfig.model_validate(tree))
        return await run_coordinator(process, make=answers.build), simulation


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    path = outcome.run_dir / "evaluations" / "evaluation-v0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_several_sampled_answers_are_scored_and_every_prompt_weighs_the_same(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    outcome, simulation = await answered(tmp_path, nats_server, score=True, samples=4, temperature=0.7)
    assert (outcome.exit_code, outcome.ended.outcome) == (0, "finished"), outcome.ended.reason
    assert outcome.ended.export_path == "" and not (outcome.run_dir / "run.db").exists()
    found = lines(outcome)
    assert [(line["row"], line["sample"]) for line in found] == [
        (row, sample) for row in range(3) for sample in range(4)
    ]
    (evaluated,) = outcome.of("evaluated")
    means = [statistics.fmean(line["score"] for line in found if line["row"] == row) for row in range(3)]
    assert evaluated.score_mean == pytest.approx(statistics.fmean(means)) and evaluated.prompts == 3
    sampled = [request.sampling.temperature for request in simulation.rollout.requests]
    assert sampled == pytest.approx([0.7] * 3)


async def test_answers_that_nobody_scores(tmp_path: Path, nats_server: NatsServer) -> None:
    outcome, simulation = await answered(tmp_path, nats_server, score=False)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert outcome.of("evaluated") == [] and simulation.reward.seen == []
    assert all(line["score"] is None and line["failure"] is None and line["tokens"] for line in lines(outcome))
