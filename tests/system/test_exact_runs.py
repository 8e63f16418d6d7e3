"""`determinism: exact`, seen in whole runs of the real services with the embedded engine and DeepSpeed: the weights are
the same bits however many engines share the work, over the border of an epoch, with a filter, and when resumed there.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run_ledger import ledger_rows
from tests.tiny import models, task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
RUN_SECONDS = 600.0
PROMPTS, PER_STEP, STEPS = 10, 2, 10  # an epoch ends with Step 5
REWARD = """
def vowels(response, **_): return sum(c in 'aeiou' for c in response) / (len(response) + 1)
def begins(response, **_): return float(response[:1] in 'aeiou')
"""


class Runs:
    """One recipe, and runs of it with changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models.make_tiny_model(folder / "model", hidden=64)
        task.write_jsonl(folder / "train.jsonl", task.make_examples()[0][:PROMPTS])
        task.write_jsonl(folder / "held.jsonl", task.make_examples()[0][PROMPTS : PROMPTS + 4])
        (folder / "reward.py").write_text(REWARD)
        scorers = [{"name": name, "path": "reward.py", "function": name} for name in ("vowels", "begins")]
        tree: dict[str, Any] = {
            "run": {"name": "whole", "directory": "runs", "seed": 5},
            "model": {"path": "model", "dtype": "float32"},
            "coordinator": {
                "steps": STEPS,
                "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
                "evaluation": {"path": "held.jsonl", "name": "held", "max_tokens": 8, "at_start": False},
                "sampling": {"max_tokens": 12},
                "prompts_per_step": PER_STEP,
                "samples_per_prompt": 4,
                "scorer": "vowels",
                "publication": {"bucket_mib": 1},
            },
            "rollout": {"engine": "transformers", "determinism": "exact", "max_sequence_tokens": 64},
            "reward": {"scorers": scorers},
            "learner": {"optimizer": {"learning_rate": 1e-3}},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))

    def train(self, name: str, *changes: str) -> Run:
        return self._called(name, "train", "recipe.yaml", f"run.name={name}", *changes)

    def resume(self, name: str, *changes: str) -> Run:
        return self._called(name, "resume", f"runs/{name}", *changes)

    def _called(self, name: str, *arguments: str) -> Run:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments], cwd=self.folder, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_SECONDS,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return Run(self.folder / "runs" / name)


class Run:
    """What a run left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        return ledger_rows(self.folder, query)

    @property
    def batches(self) -> list[tuple[int, bytes]]:
        """Step and digest: which tokens, log-probabilities and advantages were trained."""
        return self.ledger("SELECT step, digest FROM batches ORDER BY step")

    @property
    def weights(self) -> str:
        """Digest of the exported policy."""
        (folder,) = (self.folder / "export").iterdir()
        (file,) = folder.glob("*.safetensors")
        return hashlib.sha256(file.read_bytes()).hexdigest()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def sampled_by(self) -> set[str]:
        """The engines that trained trajectories are from."""
        from antiphon.types.v1 import trajectory_pb2

        blobs = self.ledger("SELECT trajectories.message FROM trajectories JOIN batch_rows USING (trajectory_id)")
        return {trajectory_pb2.Trajectory.FromString(blob).worker_id for (blob,) in blobs}

    def require_each_once(self, steps: int, rows: int) -> None:
        assert self.ledger("SELECT count(*), count(DISTINCT trajectory_id) FROM batch_rows") == [(rows, rows)]
        assert self.ledger("SELECT step, policy_version FROM steps") == [(n, n) for n in range(1, steps + 1)]
        assert [line["step"] for line in self.metrics if "loss" in line] == list(range(1, steps + 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("exact"))


def test_two_engines_resumed_at_the_border_of_an_epoch_are_one_engine_uninterrupted(runs: Runs) -> None:
    whole = runs.train("whole")
    whole.require_each_once(STEPS, STEPS * PER_STEP * 4)
    replicas = ("coordinator.rollout_workers=2", "coordinator.reward_workers=2")
    half = runs.train("halves", *replicas, "coordinator.steps=5", "coordinator.checkpoint.every=5")
    assert half.ledger("SELECT DISTINCT epoch FROM groups") == [(0,)] and len(half.batches) == 5
    first = half.weights
    (half.folder / "export").rename(half.folder / "export-5")
    both = runs.resume("halves", "coordinator.steps=10")
    both.require_each_once(STEPS, STEPS * PER_STEP * 4)
    assert both.ledger("SELECT epoch, count(*) FROM groups GROUP BY epoch") == [(0, PROMPTS), (1, PROMPTS)]
    assert both.sampled_by() == {"rollout-0", "rollout-1"} and whole.sampled_by() == {"rollout-0"}
    assert both.batches == whole.batches
    assert both.weights == whole.weights != first
    assert [line["publish/engines"] for line in both.metrics if "loss" in line] == [2.0] * STEPS
    scores = [run.ledger("SELECT score_mean FROM evaluations WHERE policy_version = 10") for run in (whole, both)]
    assert scores[0] == scores[1] != []


def test_a_filter_that_takes_groups_out_goes_on_where_it_was(runs: Runs) -> None:
    changes = ("coordinator.scorer=begins", "coordinator.filter={type: spread, most_extra_prompts: 30}")
    whole = runs.train("filter-whole", *changes, "coordinator.steps=3")
    states = dict(whole.ledger("SELECT state, count(*) FROM groups GROUP BY state"))
    assert states["complete"] == 3 * PER_STEP and states["filtered"] > 0, states
    whole.require_each_once(3, 3 * PER_STEP * 4)
    part = runs.train(
        "filter-parts",
        *changes,
        "coordinator.steps=1",
        "coordinator.checkpoint.every=1",
        "coordinator.rollout_workers=2",
    )
    (part.folder / "export").rename(part.folder / "export-1")
    both = runs.resume("filter-parts", "coordinator.steps=3")
    both.require_each_once(3, 3 * PER_STEP * 4)
    query = "SELECT group_id, admission, state FROM groups ORDER BY admission"
    assert both.ledger(query) == whole.ledger(query)
    assert both.batches == whole.batches and both.weights == whole.weights


def test_several_ranks_and_several_engines_give_the_same_bits_twice(runs: Runs) -> None:
    changes = (
        "coordinator.rollout_workers=2",
        "coordinator.reward_workers=2",
        "learner.ranks=2",
        "coordinator.steps=2",
    )
    first, second = (runs.train(name, *changes) for name in ("ranks-1", "ranks-2"))
    for run in (first, second):
        run.require_each_once(2, 2 * PER_STEP * 4)
    assert first.batches == second.batches and first.weights == second.weights
