"""A run that is stopped, or killed, and resumed has the weights of one that nothing stopped, bit by bit: with the real
services, the embedded engine under `determinism: exact`, and DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.run_processes import find_processes, kill_processes
from tests.tiny import models, task

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS = 10
RUN_SECONDS = 400.0
REWARD = "def score(prompt, response, reference): return sum(c in 'aeiou' for c in response) / (len(response) + 1)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    models.make_tiny_model(folder / "model", hidden=64)
    # Twelve prompts, two a Step: the run crosses the border of an epoch between Step 6 and 7.
    task.write_jsonl(folder / "train.jsonl", task.make_examples()[0][:12])
    (folder / "reward.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "run": {"name": "whole", "directory": str(folder / "runs"), "seed": 5},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": STEPS,
            "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
            "sampling": {"max_tokens": 12},
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "scorer": "vowels",
            "publication": {"bucket_mib": 1},
        },
        "rollout": {"engine": "transformers", "determinism": "exact", "max_sequence_tokens": 64},
        "reward": {"scorers": [{"name": "vowels", "path": "reward.py"}]},
        "learner": {"optimizer": {"learning_rate": 1e-3}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The folder of a run that nothing stopped."""
    assert command(folder, "train", "recipe.yaml").wait(RUN_SECONDS) == 0, said(folder)
    return folder / "runs" / "whole"


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", *arguments],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip


def said(folder: Path) -> str:
    return (folder / "output.txt").read_text()[-4000:]


def after_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when that Step's line is written."""
    end = time.monotonic() + RUN_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < end, said(run_dir.parents[1])
        time.sleep(0.01)


def weights(run_dir: Path) -> str:
    return digest_of(run_dir / "export" / f"policy-{STEPS}")


def digest_of(model: Path) -> str:
    (file,) = model.glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def batches(run_dir: Path) -> list[tuple[int, bytes]]:
    with sqlite3.connect(f"file:{run_dir}/run.db?mode=ro", uri=True) as db:
        return db.execute("SELECT step, digest FROM batches ORDER BY step").fetchall()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_resumed_weights_are_those_of_a_run_that_nothing_stopped(folder: Path, whole: Path, how: str) -> None:
    run_dir = folder / "runs" / how
    process = command(folder, "train", "recipe.yaml", f"run.name={how}", "coordinator.checkpoint.every=4")
    try:
        after_step(run_dir, 5, process)
        process.send_signal(signal.SIGINT if how == "stopped" else signal.SIGKILL)
        code = process.wait(60.0)
    finally:
        process.kill()
    if how == "stopped":
        assert code == 130 and f"antiphon resume {run_dir}" in said(folder), said(folder)
    else:
        run_id = json.loads((run_dir / "manifest.json").read_text())["run_id"]
        end = time.monotonic() + 30.0
        while find_processes(run_id) and time.monotonic() < end:
            time.sleep(0.05)
        assert kill_processes(run_id, 1.0) == []
    done = len(batches(run_dir))
    assert 5 <= done < STEPS, "it was over before the signal came"
    assert command(folder, "resume", str(run_dir)).wait(RUN_SECONDS) == 0, said(folder)
    assert batches(run_dir) == batches(whole)
    assert weights(run_dir) == weights(whole) != digest_of(folder / "model")
    # Stopped: its last Step was saved. Killed: the Steps after the checkpoint of Step 4 came from the ledger.
    assert ("were replayed from the ledger" in (run_dir / "events.jsonl").read_text()) is (how == "killed")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    again = command(folder, "resume", str(run_dir))
    assert again.wait(60.0) == 2 and "is finished" in said(folder)
