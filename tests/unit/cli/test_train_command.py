"""`antiphon train` as a process, with real NATS and stand-ins for the services: how it starts, ends and cleans up."""

from __future__ import annotations

import contextlib
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

from services.cli.recipe import Recipe, read_recipe
from services.cli.run_processes import find_processes, kill_processes
from services.common.config import load_process_config
from services.coordinator.config import CoordinatorConfig
from services.learner.config import LearnerConfig
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig
from tests.unit.cli.standins.recipe import write_recipe

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 90.0


class Command:
    """A running `antiphon train`, leader of a session of its own."""

    def __init__(self, folder: Path, *assignments: str, **standins: str) -> None:
        self.folder = folder
        self.recipe = write_recipe(folder)
        self.run_dir = folder / "runs" / "story"
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        environment |= {f"STANDIN_{kind.upper()}": how for kind, how in standins.items()}
        command = [sys.executable, "-m", "tests.unit.cli.standins.antiphon", "train", str(self.recipe), *assignments]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.output = ""

    @property
    def run_id(self) -> str:
        return str(load_process_config(RewardConfig, self.run_dir / "processes" / "reward-0.yaml").service.run_id)

    def wait_for_event(self, text: str) -> None:
        events = self.run_dir / "events.jsonl"
        self.wait_for(lambda: events.exists() and text in events.read_text(), f"event {text}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"{what} did not come; exit code {self.process.poll()}\n{self.process.communicate()[0]}")
            time.sleep(0.02)

    def ended(self, seconds: float = WAIT_SECONDS) -> int:
        self.output = self.process.communicate(timeout=seconds)[0]
        return int(self.process.returncode)

    def alive(self) -> list[int]:
        return find_processes(self.run_id)

    def next_assignments(self) -> list[str]:
        """The command that the output offers, without `antiphon train RECIPE`."""
        (line,) = (line for line in self.output.splitlines() if line.startswith("  antiphon train "))
        words = shlex.split(line)
        assert words[:3] == ["antiphon", "train", str(self.recipe)]
        return words[3:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def make(*assignments: str, **standins: str) -> Command:
        commands.append(Command(tmp_path, *assignments, **standins))
        return commands[-1]

    yield make
    for command in commands:
        command.process.kill()
        command.process.wait()
        with contextlib.suppress(Exception):
            kill_processes(command.run_id, 5.0)


def test_a_run_that_finishes(start: Callable[..., Command]) -> None:
    command = start("coordinator.steps=3", coordinator="finish")
    assert command.ended() == 0, command.output
    assert command.alive() == []
    output = command.output
    assert "evaluation: mean score 0.1250 over 200 prompts with policy 0" in output
    assert "evaluation: mean score 0.8750 over 200 prompts with policy 2" in output
    assert f"policy 2 exported to {command.run_dir}/export" in output
    assert "step 2/2  reward 0.5 " in output
    assert "memory of all processes at its peak" in output and "coordinator-0 0." in output
    assert "to start again" not in output and "to go on" not in output

    recipe = read_recipe(command.run_dir / "recipe.yaml", [])
    assert recipe.coordinator.steps == 3 and recipe.model.path == str(command.folder / "model")
    events = [json.loads(line) for line in (command.run_dir / "events.jsonl").read_text().splitlines()]
    assert [int(e.get("sequence", 0)) for e in events] == list(range(len(events)))
    assert events[-1]["runEnded"]["outcome"] == "finished"
    samples = [json.loads(line) for line in (command.run_dir / "memory.jsonl").read_text().splitlines()]
    assert max(sample["total_mib"] for sample in samples) > 20
    manifest = json.loads((command.run_dir / "manifest.json").read_text())
    assert manifest["run_id"] == command.run_id and manifest["seed"] == 7
    assert manifest["versions"]["grpcio"] and manifest["recipe"]["coordinator"]["steps"] == 3

    # Every worker was started with its part of the recipe.
    kinds: dict[str, tuple[Any, Any]] = {
        "rollout": (RolloutConfig, recipe.rollout),
        "reward": (RewardConfig, recipe.reward),
        "learner": (LearnerConfig, recipe.learner),
        "coordinator": (CoordinatorConfig, recipe.coordinator),
    }
    for kind, (model, settings) in kinds.items():
        process = load_process_config(model, command.run_dir / "processes" / f"{kind}-0.yaml")
        assert process.settings == settings
        assert process.model == recipe.model
        assert (process.service.worker_id, process.service.seed) == (f"{kind}-0", 7)
        assert process.service.run_dir == command.run_dir
        assert process.service.nats_monitor_url
    for kind in ("rollout", "reward", "learner"):
        environment = (command.run_dir / f"{kind}-0.environment").read_text().splitlines()
        assert f"ANTIPHON_RUN_ID={command.run_id}" in environment
        assert "HF_HUB_OFFLINE=1" in environment
        assert f"{kind}-0 is here" in (command.run_dir / "logs" / f"{kind}-0.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_training_exports_and_says_how_to_go_on(
    start: Callable[..., Command], number: signal.Signals, code: int
) -> None:
    command = start("run.seed=3", coordinator="train")
    command.wait_for_event('"stepFinished"')
    os.kill(command.process.pid, number)
    assert command.ended() == code, command.output
    assert command.alive() == []
    export = f"{command.run_dir}/export"
    assert f"policy 1 exported to {export}" in command.output
    assert command.next_assignments() == ["run.seed=3", f"model.path={export}", "run.name=story-2"]


def test_a_signal_before_the_first_step_says_how_to_start_again(start: Callable[..., Command]) -> None:
    command = start(coordinator="start")
    command.wait_for_event("RUN_PHASE_START")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.ended() == 130, command.output
    assert command.alive() == []
    assert "no step was trained" in command.output
    assert command.next_assignments() == ["run.name=story-2"]


def test_a_signal_while_services_start_ends_what_does_not_listen(start: Callable[..., Command]) -> None:
    """The coordinator has not announced itself, a worker ignores SIGTERM, another has left a daemon in a session."""
    command = start(coordinator="mute", learner="stubborn", rollout="daemon")
    ready = [command.run_dir / f"{worker}-0.ready" for worker in ("learner", "rollout")]
    command.wait_for(lambda: all(path.exists() for path in ready), "workers")
    command.wait_for(lambda: len(command.alive()) >= 6, "nats, four workers, the daemon")
    began = time.monotonic()
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.ended() == 130, command.output
    assert time.monotonic() - began < 30
    assert command.alive() == []
    assert "left behind by the workers, killed" in (command.run_dir / "cli.log").read_text()


def test_a_second_signal_kills_at_once(start: Callable[..., Command]) -> None:
    command = start(coordinator="deaf", learner="stubborn")
    command.wait_for_event('"stepFinished"')
    os.kill(command.process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert command.process.poll() is None  # it waits for the end of the run
    began = time.monotonic()
    os.kill(command.process.pid, signal.SIGINT)
    assert command.ended() == 130, command.output
    assert time.monotonic() - began < 15  # not the 20 s that RunEnded is waited for
    assert command.alive() == []


def test_kill_of_the_command_takes_everything_with_it(start: Callable[..., Command]) -> None:
    command = start(coordinator="train", learner="stubborn")
    command.wait_for_event('"stepFinished"')
    run_id = command.run_id
    assert len(find_processes(run_id)) >= 5
    os.kill(command.process.pid, signal.SIGKILL)
    assert command.ended() == -signal.SIGKILL
    end = time.monotonic() + 30
    while find_processes(run_id) and time.monotonic() < end:
        time.sleep(0.05)
    assert find_processes(run_id) == []


def test_a_worker_that_dies_ends_the_run_with_its_last_words(start: Callable[..., Command]) -> None:
    command = start(coordinator="train", reward="die")
    command.wait_for_event('"stepFinished"')
    (command.run_dir / "die").touch()
    assert command.ended() == 1, command.output
    assert command.alive() == []
    assert "reward-0 ended unexpectedly (exit code 23)" in command.output
    assert "the disk is on fire" in command.output
    assert "  line 39\n" in command.output and "  line 20\n" not in command.output
    assert f"all of it: {command.run_dir}/logs/reward-0.log" in command.output
    assert f"policy 1 exported to {command.run_dir}/export" in command.output  # what was trained is saved


def test_a_coordinator_that_dies_ends_the_run(start: Callable[..., Command]) -> None:
    command = start(coordinator="die")
    command.wait_for_event('"stepFinished"')
    (command.run_dir / "die").touch()
    assert command.ended() == 1, command.output
    assert command.alive() == []
    assert "coordinator-0 ended unexpectedly (exit code 9)" in command.output
    assert "no more ideas" in command.output
    assert "the policy was not exported; to start again" in command.output


def test_a_run_that_fails_says_why(start: Callable[..., Command]) -> None:
    command = start(coordinator="fail")
    assert command.ended() == 1, command.output
    assert command.alive() == []
    assert "run failed: learner-0: out of memory; its log is /logs/learner-0.log" in command.output


def test_a_wrong_recipe_starts_nothing(start: Callable[..., Command]) -> None:
    command = start("coordinator.scorer=other", "model.path=nowhere", coordinator="finish")
    assert command.ended() == 2
    assert "2 problem(s)" in command.output
    assert not (command.folder / "runs").exists()


def test_a_run_that_exists_is_not_overwritten(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "runs" / "story").mkdir(parents=True)
    (tmp_path / "runs" / "story-2").mkdir(parents=True)
    command = start(coordinator="finish")
    assert command.ended() == 2
    assert "name this run otherwise: run.name=story-3" in command.output
    assert list((tmp_path / "runs" / "story").iterdir()) == []


def test_the_written_recipe_is_a_recipe(tmp_path: Path) -> None:
    assert isinstance(read_recipe(write_recipe(tmp_path), [], tmp_path), Recipe)
