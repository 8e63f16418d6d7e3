"""kill -9 of each service in each phase, with the real ones on a tiny model: the launcher starts it again, the run
completes, and is the run that nothing disturbed: every trajectory trained once, none lost, none sampled again that the
ledger had acknowledged, the same weights bit by bit (`determinism: exact`).

Each service has one run, in which it is killed once in each phase. A run fails when it was not in the phase that was
meant at the moment of a kill, by its own events: it would have tested something else.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.run_processes import command_of, find_processes, kill_processes, parent_of
from tests.run_ledger import ledger_rows
from tests.tiny import models, task

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, SAMPLES = 5, 3, 4
ROWS = STEPS * PROMPTS * SAMPLES
RUN_SECONDS = 900.0
# It takes its time: a kill must find somebody scoring.
REWARD = """
import time

def score(prompt, response, reference):
    time.sleep(0.1)
    return sum(c in 'aeiou' for c in response) / (len(response) + 1)
"""
KILLS = [("start", 0), ("generate", 2), ("evaluate", 2), ("score", 3), ("train", 4), ("publish", 5), ("export", 5)]
EXPORTING = ("rollout-0", "learner-0", "coordinator-0")
SERVICES = ("rollout-0", "reward-0", "learner-0", "coordinator-0", "nats")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    models.make_tiny_model(folder / "model", hidden=256, layers=4)
    examples = task.make_examples()[0]
    task.write_jsonl(folder / "train.jsonl", examples[:24])
    task.write_jsonl(folder / "held.jsonl", examples[24:32])
    (folder / "reward.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "run": {"name": "whole", "directory": str(folder / "runs"), "seed": 5, "restarts": len(KILLS)},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": STEPS,
            "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
            "evaluation": {"path": "held.jsonl", "max_tokens": 8, "every": 2, "at_start": False},
            "sampling": {"max_tokens": 16},
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "algorithm": {"epochs": 4},
            "scorer": "vowels",
            "publication": {"bucket_mib": 1, "deadline_seconds": 30},
            "checkpoint": {"every": 1},
        },
        "rollout": {"engine": "transformers", "determinism": "exact", "max_sequence_tokens": 64},
        "reward": {"scorers": [{"name": "vowels", "path": "reward.py"}]},
        "learner": {"optimizer": {"learning_rate": 1e-3}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


class Run:
    """`antiphon train` with an engine that counts."""

    def __init__(self, folder: Path, name: str, *assignments: str) -> None:
        self.run_dir = folder / "runs" / name
        self.samples_log = folder / f"{name}-samples.jsonl"
        self._output = folder / f"{name}-output.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}",
            "SAMPLES_LOG": str(self.samples_log),
        }
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.train_counted", "recipe.yaml", f"run.name={name}", *assignments],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def run_id(self) -> str:
        return str(json.loads((self.run_dir / "manifest.json").read_text())["run_id"])

    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait_for_phase(self, phase: str, step: int) -> None:
        """Until it is entered, that of this Step."""
        end = time.monotonic() + RUN_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            changes = [e["phaseChanged"] for e in self.events() if "phaseChanged" in e]
            entered = bool(changes) and (_name(changes[-1]), int(changes[-1].get("step", 0))) == (phase, step)
            # In the middle of sampling some answers are finished, and of some prompts not all.
            if entered and (phase != "generate" or self.finished(step - 1) >= SAMPLES + 1):
                return
            time.sleep(0.002)
        pytest.fail(f"phase {phase} did not come; exit code {self.process.poll()}\n{self.output}")

    def pid_of(self, service: str) -> int:
        """Of the process of a service; it is there in every phase, at the start after a moment."""
        marks = ("nats-server",) if service == "nats" else (f"processes/{service}.yaml", " -m ")
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            for pid in find_processes(self.run_id):
                if all(mark in command_of(pid) for mark in marks):
                    return pid
            time.sleep(0.01)
        pytest.fail(f"{service} is not there\n{self.output}")

    def finished(self, version: int) -> int:
        """Answers to train on that the engine finished under a version."""
        text = self.samples_log.read_text() if self.samples_log.exists() else ""
        return text.count(f"/v{version}/")

    def child_of(self, service: str, mark: str) -> int:
        parent = self.pid_of(service)
        return next(pid for pid in find_processes(self.run_id) if parent_of(pid) == parent and mark in command_of(pid))

    def phase_at(self, moment: float) -> str:
        entered = [
            (datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp(), _name(event["phaseChanged"]))
            for event in self.events()
            if "phaseChanged" in event
        ]
        return [name for when, name in entered if when <= moment][-1]

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        return ledger_rows(self.run_dir, query)

    def acknowledged(self) -> set[str]:
        """Trajectories in the ledger now."""
        if not (self.run_dir / "run.db").exists():
            return set()
        return {name for (name,) in self.ledger("SELECT trajectory_id FROM trajectories")}

    def batches(self) -> list[tuple[Any, ...]]:
        return self.ledger("SELECT step, digest FROM batches ORDER BY step")

    def weights(self) -> str:
        (file,) = (self.run_dir / "export" / f"policy-{STEPS}").glob("*.safetensors")
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def scores(self) -> list[tuple[Any, ...]]:
        return self.ledger("SELECT dataset, policy_version, score_mean FROM evaluations ORDER BY policy_version")

    def sampled(self) -> collections.Counter[str]:
        """How often the engine, in all its lives, finished each trajectory that is trained on."""
        text = self.samples_log.read_text() if self.samples_log.exists() else ""
        lines = [json.loads(line)["id"] for line in text.splitlines()]
        counts: collections.Counter[str] = collections.Counter()
        for name in lines:
            if name.startswith(f"{self.run_id}/"):
                _, dataset, epoch, row, _, sample = name.split("/")
                counts[f"{dataset}/{epoch}/{row}/{sample}"] += 1
        return counts


def _name(change: dict[str, Any]) -> str:
    return str(change["phase"]).removeprefix("RUN_PHASE_").lower()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    """A run that nothing disturbs."""
    run = Run(folder, "whole")
    assert run.process.wait(RUN_SECONDS) == 0, run.output
    trained = {name for (name,) in run.ledger("SELECT trajectory_id FROM batch_rows")}
    assert run.sampled() == dict.fromkeys(trained, 1)
    return run


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    callspec = getattr(request.node, "callspec", None)
    started = Run(folder, str(callspec.params["service"]) if callspec else "children")
    yield started
    started.process.kill()
    started.process.wait()
    if (started.run_dir / "manifest.json").exists():
        kill_processes(started.run_id, 10.0)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_killed_in_each_phase_costs_the_run_nothing(whole: Run, run: Run, service: str) -> None:
    before: dict[str, int] = {}
    moments: list[float] = []
    kills = [kill for kill in KILLS if kill[0] != "export" or service in EXPORTING]
    for phase, step in kills:
        if moments:  # the run may go on without it, and be in the next phase before it is back
            run.pid_of(service)
        run.wait_for_phase(phase, step)
        pid = run.pid_of(service)
        sampled = run.sampled()
        before |= {name: sampled[name] for name in run.acknowledged()}
        moments.append(time.time())
        os.kill(pid, signal.SIGKILL)

    assert run.process.wait(RUN_SECONDS) == 0, run.output
    assert [run.phase_at(moment) for moment in moments] == [phase for phase, _ in kills], run.output
    for number in range(1, len(kills) + 1):
        assert f"started again in {min(2 ** (number - 1), 4)} s, restart {number} of {len(KILLS)}" in run.output
    require_undisturbed(run, whole)
    sampled = run.sampled()
    assert set(sampled) == {name for (name,) in run.ledger("SELECT trajectory_id FROM batch_rows")}
    again = {name for name, count in sampled.items() if count > 1}
    print(f"{service}: {len(before)} acknowledged before kills, {len(again)} of {ROWS} sampled again")
    assert {name: sampled[name] for name in before} == before, "what the ledger had was sampled again"
    if service != "rollout-0":
        assert not again, "the engine held it"


@pytest.mark.timeout(1800)
def test_a_child_of_a_service_that_is_killed_takes_the_service_with_it_and_nothing_else(whole: Run, run: Run) -> None:
    run.wait_for_phase("generate", 2)
    os.kill(run.child_of("rollout-0", "spawn_main"), signal.SIGKILL)
    run.wait_for_phase("train", 4)
    os.kill(run.child_of("learner-0", "rank_main"), signal.SIGKILL)
    assert run.process.wait(RUN_SECONDS) == 0, run.output
    assert "rollout-0 ended unexpectedly (exit code 1); started again" in run.output
    assert "learner-0 ended unexpectedly (exit code 1); started again" in run.output
    require_undisturbed(run, whole)


def require_undisturbed(run: Run, whole: Run) -> None:
    """It came to the end of the run that nothing disturbed; nothing is left of it."""
    assert find_processes(run.run_id) == []

    assert run.batches() == whole.batches()
    assert run.ledger("SELECT count(*), count(DISTINCT trajectory_id) FROM batch_rows") == [(ROWS, ROWS)]
    assert run.ledger("SELECT step, policy_version FROM steps") == [(n, n) for n in range(1, STEPS + 1)]
    assert run.ledger("SELECT count(*) FROM scores WHERE failure IS NOT NULL") == [(0,)]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert run.scores() == whole.scores()
    assert run.weights() == whole.weights()
