"""`antiphon up`, `down` and `train --json` as processes, with real NATS and stand-ins for the services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli import down
from services.cli.run_processes import find_processes, kill_processes
from tests.unit.cli.standins.recipe import write_recipe

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 90.0


class Command:
    """A command of a run "story" in a session of its own, its output in files."""

    def __init__(self, folder: Path, *arguments: str, **standins: str) -> None:
        self.run_dir = folder / "runs" / "story"
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}", "MARKER": "of the caller"}
        environment |= {f"STANDIN_{kind.upper()}": how for kind, how in standins.items()}
        verb, *rest = arguments
        command = [sys.executable, "-m", "tests.unit.cli.standins.antiphon", verb, str(write_recipe(folder)), *rest]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, start_new_session=True, stdout=out, stderr=err
            )

    @property
    def run_id(self) -> str:
        return str(json.loads((self.run_dir / "manifest.json").read_text())["run_id"])

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{what} did not come; {self.process.poll()}\n{self.out.read_text()}{self.err.read_text()}")
            time.sleep(0.02)

    def wait_for_ready(self, *workers: str) -> None:
        ready = [self.run_dir / f"{worker}-0.ready" for worker in workers]
        self.wait_for(lambda: all(path.exists() for path in ready), f"{workers}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def make(*arguments: str, **standins: str) -> Command:
        commands.append(Command(tmp_path, *arguments, **standins))
        return commands[-1]

    yield make
    for command in commands:
        command.process.kill()
        command.process.wait()
        if (command.run_dir / "manifest.json").exists():
            kill_processes(command.run_id, 5.0)


def end(run_dir: Path) -> tuple[down.Ended, str]:
    """`down` in this process; what it did, and what it says."""
    said: list[str] = []
    ended = down.down(run_dir, said.append)
    return ended, "\n".join([*said, down.as_text(ended)])


def test_a_run_that_trains_is_stopped_from_elsewhere(start: Callable[..., Command]) -> None:
    """And --json is the run's events on stdout, everything else as JSON on stderr."""
    command = start("train", "--json", coordinator="train")
    command.wait_for(lambda: '"stepFinished"' in command.out.read_text(), "a Step")
    run_id = command.run_id
    for worker in ("learner-0", "rollout-0", "reward-0"):
        assert "MARKER=of the caller" in (command.run_dir / f"{worker}.environment").read_text().splitlines()
    ended, said = end(command.run_dir)
    assert command.process.wait(10) == 143  # SIGTERM
    assert (ended.asked, ended.killed, ended.outcome) == (command.process.pid, {}, "stopped")
    assert find_processes(run_id) == []
    assert f"asking process {command.process.pid} to stop" in said and "stopped" in said

    events = [json.loads(line) for line in command.out.read_text().splitlines()]
    assert events[-1]["runEnded"]["outcome"] == "stopped"
    assert [json.loads(line) for line in (command.run_dir / "events.jsonl").read_text().splitlines()] == events
    lines = [json.loads(line)["line"] for line in command.err.read_text().splitlines()]
    assert "run stopped" in lines

    again, said = end(command.run_dir)
    assert not again.something and said.startswith(f"nothing is left of run {run_id}")


def test_what_a_killed_command_left_is_found_by_the_runs_id(start: Callable[..., Command]) -> None:
    command = start("up", rollout="daemon")
    command.wait_for_ready("learner", "rollout", "reward")
    run_id = command.run_id
    command.wait_for(lambda: len(find_processes(run_id)) >= 5, "nats, three workers, the daemon")
    command.process.send_signal(signal.SIGKILL)
    assert command.process.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while len(find_processes(run_id)) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    (daemon,) = find_processes(run_id)  # asked no kernel to die with anybody
    ended, said = end(command.run_dir)
    assert list(ended.killed) == [daemon] and ended.asked is None and f"killed {daemon}: " in said
    assert find_processes(run_id) == []
    assert not end(command.run_dir)[0].something


@pytest.mark.slow
def test_services_that_are_up_end_with_down(start: Callable[..., Command]) -> None:
    command = start("up", "--json")
    command.wait_for_ready("learner", "rollout", "reward")
    ended, _ = end(command.run_dir)
    assert command.process.wait(10) == 143 and ended.asked == command.process.pid and ended.killed == {}
    said: list[dict[str, Any]] = [json.loads(line) for line in command.out.read_text().splitlines()]
    assert said[0] == {"run": command.run_id, "folder": str(command.run_dir)}
    assert said[1]["nats"].startswith("nats://127.0.0.1:") and "stopping" in said[-1]
    assert not (command.run_dir / "processes" / "coordinator-0.yaml").exists()  # they were not all up yet


@pytest.mark.slow
def test_a_service_that_ends_is_told_with_its_last_words(start: Callable[..., Command]) -> None:
    command = start("up", "--json", reward="die")
    command.wait_for_ready("learner", "rollout")
    (command.run_dir / "die").touch()
    assert command.process.wait(WAIT_SECONDS) == 1
    (told,) = map(json.loads, command.err.read_text().splitlines())
    assert told["code"] == "ANT-RUN-FAILED" and "reward-0 ended unexpectedly (exit code 23)" in told["what"]
    assert any("the disk is on fire" in line for line in told["problems"])
    assert find_processes(command.run_id) == []


@pytest.mark.slow
def test_a_run_that_another_command_has_is_not_taken_up(start: Callable[..., Command]) -> None:
    command = start("up")
    command.wait_for_ready("learner")
    (command.run_dir / "run.db").touch()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "resume", str(command.run_dir), "--json"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    told = json.loads(done.stderr)
    assert (done.returncode, told["code"]) == (2, "ANT-RUN-ALIVE")
    assert f"process {command.process.pid}" in told["what"] and "antiphon down" in told["what_to_do"]
