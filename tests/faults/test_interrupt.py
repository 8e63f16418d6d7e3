"""Ctrl-C and kill -9 in every phase, with the real services on a tiny model: nothing may be left alive.

Twelve cells; three that cover each signal, each in a phase of its own, run by default. A cell fails when the run was
not in its phase at the moment of the signal, by the run's own events: it would have tested something else.
"""

from __future__ import annotations

import json
import os
import shlex
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

from services.cli.recipe import problems, read_recipe
from services.cli.resume import prepare
from services.cli.run_processes import command_of, find_processes, kill_processes, parent_of
from services.common.config import load_process_config
from services.reward.config import RewardConfig
from tests.tiny import models, task

START_SECONDS = 240.0  # until the wanted phase, on a busy machine
GONE_SECONDS = 30.0
AGREE_SECONDS = 5.0
FAST = {("interrupt the parent", "start"), ("kill the parent", "start")}
CELLS = [
    pytest.param(
        how, phase, id=f"{how}-{phase}".replace(" ", "-"), marks=[] if (how, phase) in FAST else [pytest.mark.slow]
    )
    for how in ("interrupt the group", "interrupt the parent", "kill the parent")
    for phase in ("start", "generate", "train", "publish")
]


# Answers of an untrained model differ by it, so that a Step changes the weights.
REWARD = "def score(prompt, response, reference): return sum(c in 'aeiou' for c in response) / (len(response) + 1)\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe whose Steps spend a noticeable time in each phase."""
    folder = tmp_path_factory.mktemp("inputs")
    models.make_tiny_model(folder / "model", hidden=256, layers=4)
    task.write_jsonl(folder / "train.jsonl", task.make_examples()[0])
    (folder / "reward.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "run": {"name": "cell"},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": 1000,
            "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
            "sampling": {"max_tokens": 48},
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "algorithm": {"epochs": 4},
            "scorer": "vowels",
            "publication": {"bucket_mib": 1},
        },
        "rollout": {"max_sequence_tokens": 64, "kv_cache_gib": 0.25},
        "reward": {"scorers": [{"name": "vowels", "path": "reward.py"}]},
        "learner": {"optimizer": {"learning_rate": 1e-4}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


class Run:
    """`antiphon train` in a session of its own."""

    def __init__(self, inputs: Path, folder: Path) -> None:
        self.inputs = inputs
        self.run_dir = folder / "cell"
        self._output_path = folder / "output.txt"
        with self._output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "train", "recipe.yaml", f"run.directory={folder}"],
                cwd=inputs, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output_path.read_text()

    @property
    def run_id(self) -> str:
        process = load_process_config(RewardConfig, self.run_dir / "processes" / "reward-0.yaml")
        return str(process.service.run_id)

    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait_for_phase(self, phase: str) -> None:
        """Until the last phase entered is the wanted one, after the first Step where it is one of a Step's phases."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            changes = [e["phaseChanged"] for e in self.events() if "phaseChanged" in e]
            if changes and _name(changes[-1]) == phase and (phase == "start" or int(changes[-1].get("step", 0)) >= 2):
                return
            time.sleep(0.002)
        pytest.fail(f"phase {phase} did not come; exit code {self.process.poll()}\n{self.output}")

    def phase_at(self, moment: float) -> str:
        """The phase the coordinator says it was in at that time (seconds since the epoch)."""
        entered = [
            (datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp(), _name(event["phaseChanged"]))
            for event in self.events()
            if "phaseChanged" in event
        ]
        return [name for when, name in entered if when <= moment][-1]

    def family(self) -> dict[int, str]:
        """Every descendant of the command, by parent ids, and its command line."""
        parents = {int(e.name): parent_of(int(e.name)) for e in Path("/proc").iterdir() if e.name.isdigit()}
        found: set[int] = set()
        frontier = {self.process.pid}
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
            found |= frontier
        return {pid: command_of(pid) for pid in found}


def _name(change: dict[str, Any]) -> str:
    return str(change["phase"]).removeprefix("RUN_PHASE_").lower()


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Iterator[Run]:
    started = Run(inputs, tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    if (started.run_dir / "processes" / "reward-0.yaml").exists():
        kill_processes(started.run_id, 10.0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("how", "phase"), CELLS)
def test_nothing_is_left(run: Run, inputs: Path, how: str, phase: str) -> None:
    run.wait_for_phase(phase)
    run_id, family = run.run_id, _settled_family(run)
    if phase != "start":
        assert any("EngineCore" in command for command in family.values()), family
        assert any("rank_main" in command for command in family.values()), family

    moment = time.time()
    began = time.monotonic()
    if how == "interrupt the group":
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        os.kill(run.process.pid, signal.SIGINT if how == "interrupt the parent" else signal.SIGKILL)
    left: list[int] = []
    while time.monotonic() < began + GONE_SECONDS:
        ended = run.process.poll() is not None
        left = [pid for pid in {*find_processes(run_id), *family} if _lives(pid, family.get(pid))]
        if ended and not left:
            break
        time.sleep(0.05)
    gone_seconds = time.monotonic() - began
    assert run.process.poll() is not None, f"the command lives after {gone_seconds:.0f} s\n{run.output}"
    assert left == [], f"alive after {gone_seconds:.0f} s: {[(pid, command_of(pid)) for pid in left]}\n{run.output}"
    print(f"{how}, {phase}: all gone after {gone_seconds:.1f} s")
    assert run.phase_at(moment) == phase, "the phase was over before the signal came"

    if how == "kill the parent":
        assert run.process.returncode == -signal.SIGKILL
        return
    assert run.process.returncode == 130, run.output
    (line,) = (line for line in run.output.splitlines() if line.startswith("  antiphon "))
    command = shlex.split(line)
    if phase == "start":
        assert command[:3] == ["antiphon", "train", "recipe.yaml"]
        following = read_recipe(inputs / "recipe.yaml", command[3:], inputs)
        assert problems(following) == []
        assert "no step was trained" in run.output
        assert following.model.path == str(inputs / "model")
    else:
        assert command == ["antiphon", "resume", str(run.run_dir)]
        following, _ = prepare(run.run_dir, [])
        assert following.run_dir == run.run_dir
        (export,) = (run.run_dir / "export").iterdir()
        assert f"exported to {export}\n" in run.output
        _check_export(export, inputs / "model")


def _settled_family(run: Run) -> dict[int, str]:
    """The descendants of the command, each carrying the run's id and none carrying it elsewhere.

    A service that starts forks between one look and the next, so looks are repeated until two of them agree: a
    process that never carries the id, or carries it and is no descendant, still fails.
    """
    end = time.monotonic() + AGREE_SECONDS
    while True:
        family = run.family()
        carrying = set(find_processes(run.run_id))
        if len(family) >= 5 and carrying == set(family):
            return family
        assert time.monotonic() < end, (
            f"no descendants of the command: {[(pid, command_of(pid)) for pid in carrying - set(family)]}; "
            f"without the run's id: {[(pid, family[pid]) for pid in set(family) - carrying]}"
        )


def _lives(pid: int, command: str | None) -> bool:
    """A process id that came to somebody else in the meantime does not count, nor does a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and (command is None or command_of(pid) == command)


def _check_export(export: Path, origin: Path) -> None:
    """It loads in plain transformers, answers, and is not the model that the run started from."""
    import torch
    import transformers

    trained = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    first = transformers.AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    assert (export / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        logits, before = trained(input_ids=ids).logits, first(input_ids=ids).logits
    assert torch.isfinite(logits).all()
    assert not torch.equal(logits, before)
