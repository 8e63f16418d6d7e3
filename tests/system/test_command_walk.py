"""The command line from end to end with the real services: a run is trained, looked into while it is alive, ended from
elsewhere, exported, asked and evaluated; and services that are up serve a coordinator of another terminal.

The model is untrained and tiny, the engine the embedded one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.run_processes import find_processes, kill_processes
from tests.tiny import models, task

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 240.0
REWARD = "def score(prompt, response, reference): return sum(c in 'aeiou' for c in response) / (len(response) + 1)\n"
OWN_TEMPLATE = models.CHAT_TEMPLATE.replace("<assistant>", "<assistant>a")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walk")
    models.make_tiny_model(folder / "model", hidden=64)
    training, heldout = task.make_examples()
    task.write_jsonl(folder / "train.jsonl", training)
    task.write_jsonl(folder / "heldout.jsonl", heldout[:32])
    (folder / "reward.py").write_text(REWARD)
    (folder / "own.jinja").write_text(OWN_TEMPLATE)
    tree: dict[str, Any] = {
        "run": {"name": "walk", "seed": 3},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": 1000,
            "data": {"path": "train.jsonl", "max_prompt_tokens": 16, "template": "own.jinja"},
            "sampling": {"max_tokens": 16},
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "scorer": "vowels",
            "evaluation": {"path": "heldout.jsonl", "max_tokens": 16},
            "checkpoint": {"every": 1, "keep_best": 0},
        },
        "rollout": {"max_sequence_tokens": 64, "engine": "transformers"},
        "reward": {"scorers": [{"name": "vowels", "path": "reward.py"}]},
        "learner": {"optimizer": {"learning_rate": 1e-3}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


def start(folder: Path, out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with out.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", *arguments],
            cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}


def antiphon(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *map(str, arguments)],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], out: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < end, out.read_text()
        time.sleep(0.1)


@pytest.fixture
def ended() -> Iterator[Callable[[subprocess.Popen[bytes], Path], subprocess.Popen[bytes]]]:
    """Sees to the end of what a test started, however it ends."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def watch(process: subprocess.Popen[bytes], run_dir: Path) -> subprocess.Popen[bytes]:
        started.append((process, run_dir))
        return process

    yield watch
    for process, run_dir in started:
        process.kill()
        process.wait()
        if (run_dir / "manifest.json").exists():
            kill_processes(json.loads((run_dir / "manifest.json").read_text())["run_id"], 10.0)


def test_a_run_and_all_that_can_be_asked_of_it(folder: Path, tmp_path: Path, ended: Any) -> None:
    run, out = tmp_path / "walk", tmp_path / "train.txt"
    command = ["train", "recipe.yaml", "--json", f"run.directory={tmp_path}"]
    process = ended(start(folder, out, *command), run)
    wait_for(lambda: len(list((run / "checkpoints").glob("step-[0-9]*"))) == 2, process, out)

    # While it is alive
    lines = [json.loads(line) for line in antiphon(folder, "samples", run, "--all", "--json").splitlines()]
    assert len(lines) == 16 and {line["step"] for line in lines} == {lines[0]["step"]}
    assert all(line["prompt"].endswith("<eos><assistant>a") for line in lines)
    (worst,) = (json.loads(line) for line in antiphon(folder, "samples", run, "--worst", "1", "--json").splitlines())
    expected = sum(c in "aeiou" for c in worst["response"]) / (len(worst["response"]) + 1)
    assert worst["score"] == pytest.approx(expected)
    heldout = antiphon(folder, "samples", run, "--heldout", "--all", "--json").splitlines()
    assert len(heldout) == 32
    early = json.loads(antiphon(folder, "export", run, "--to", tmp_path / "early", "--json"))
    assert early["made"] and (tmp_path / "early" / "chat_template.jinja").read_text() == OWN_TEMPLATE

    # Ended from elsewhere
    told = json.loads(antiphon(folder, "down", run, "--json"))
    assert process.wait(60) == 143, out.read_text()
    assert (told["asked"], told["killed"], told["outcome"]) == (process.pid, {}, "stopped")
    assert shlex.split(told["to_go_on"]) == ["antiphon", "resume", str(run)]
    assert find_processes(told["run_id"]) == []
    (policy,) = (run / "export").glob("policy-*")

    # What the run exported through its learner is what the checkpoint alone makes
    version = int(policy.name.rpartition("-")[2])
    antiphon(folder, "export", run / "checkpoints" / f"step-{version}", "--to", tmp_path / "again")
    files = {path.name: path.read_bytes() for path in policy.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert files["chat_template.jinja"].decode() == OWN_TEMPLATE

    # Asked: greedy answers of the exported policy, as plain transformers gives them
    import transformers

    prompts = ["abc", "hello"]
    found = [json.loads(line) for line in antiphon(
        folder, "generate", policy, *prompts, "--max-tokens", "6", "--dtype", "float32", "--json"
    ).splitlines()]  # fmt: skip
    assert [line["prompt"] for line in found] == prompts
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype="auto").eval()
    tokenizer = models.make_tokenizer()
    for line in found:
        ids = model.generate(
            __import__("torch").tensor([tokenizer.encode(line["rendered"]).ids]), max_new_tokens=6, do_sample=False
        )[0].tolist()
        whole = tokenizer.decode(ids[len(tokenizer.encode(line["rendered"]).ids) :])
        assert line["response"] == whole and line["rendered"] == f"<bos><user>{line['prompt']}<eos><assistant>a"

    # Scored: the number is the mean of the answers that are kept, by the reward recomputed here
    scored = json.loads(antiphon(folder, "eval", run, "--answers", tmp_path / "answers", "--json"))
    (score,) = scored["scores"]
    kept = [json.loads(line) for line in (tmp_path / "answers" / "evaluation.jsonl").read_text().splitlines()]
    again = [sum(c in "aeiou" for c in line["response"]) / (len(line["response"]) + 1) for line in kept]
    assert (scored["version"], score["prompts"]) == (version, 32)
    assert score["mean"] == pytest.approx(sum(again) / 32)


def test_services_that_are_up_serve_a_coordinator(folder: Path, tmp_path: Path, ended: Any) -> None:
    run, out = tmp_path / "walk", tmp_path / "up.txt"
    arguments = ["up", "recipe.yaml", "--json", f"run.directory={tmp_path}", "coordinator.steps=2"]
    process = ended(start(folder, out, *arguments), run)
    wait_for(lambda: '"up"' in out.read_text(), process, out)
    said = [json.loads(line) for line in out.read_text().splitlines()]
    workers = [line["worker"] for line in said if "worker" in line]
    assert workers == ["learner-0", "rollout-0", "reward-0"]
    (join,) = (line["coordinator"] for line in said if "coordinator" in line)
    done = subprocess.run(
        shlex.split(join), cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (run / "export" / "policy-2" / "model.safetensors").exists()
    assert process.poll() is None and len(find_processes(said[0]["run"])) >= 4  # they stay
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert find_processes(said[0]["run"]) == []
