"""`antiphon watch`: beside a run with real processes, and over files as runs leave them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import follow
from services.cli.__main__ import app
from services.cli.run_processes import kill_processes
from tests.unit.cli.standins.recipe import write_recipe

ROOT = Path(__file__).parents[3]
STORY = [
    {"phaseChanged": {"phase": "RUN_PHASE_GENERATE", "step": "1"}, "time": "2026-01-01T00:00:00Z"},
    {"phaseChanged": {"phase": "RUN_PHASE_TRAIN", "step": "1"}, "time": "2026-01-01T00:00:30Z"},
    {
        "stepFinished": {"step": "1", "stepsPlanned": "2", "metrics": [{"name": "reward", "value": 0.25}]},
        "time": "2026-01-01T00:00:40Z",
    },
]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run has it at its start; nobody runs it."""
    monkeypatch.setattr(follow, "ALONE_SECONDS", 0.1)
    monkeypatch.setattr(follow, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(follow, "LIFE_SECONDS", 0.02)
    monkeypatch.setattr(follow, "LOOK_AGAIN_SECONDS", 0.02)
    folder = tmp_path / "runs" / "story"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"run_id": "story-0a1b2c"}')
    return folder


def tell(run_dir: Path, *events: dict[str, Any]) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def ended(outcome: str, **more: Any) -> dict[str, Any]:
    return {"runEnded": {"outcome": outcome, **more}, "time": "2026-01-01T00:01:00Z"}


def watch(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1), ("stopped", 3)])
def test_a_run_that_is_over(outcome: str, code: int, run_dir: Path) -> None:
    tell(run_dir, *STORY, ended(outcome, reason="so it was", exportPath="/e", policy={"version": "1"}))
    done = watch(run_dir)
    assert done.exit_code == code, done.output
    assert "step 1/2  reward 0.25  40.0 s (generate 30.0 train 10.0)" in done.stdout  # by the times of the events
    assert done.stdout.endswith(f"run {outcome}: so it was\npolicy 1 exported to /e\n")


def test_json_is_the_events_as_they_stand_there(run_dir: Path) -> None:
    tell(run_dir, *STORY, ended("finished"))
    done = watch(run_dir, "--json")
    assert done.exit_code == 0
    assert done.stdout == (run_dir / "events.jsonl").read_text()


def test_a_run_that_was_killed_is_over_without_a_word(run_dir: Path) -> None:
    tell(run_dir, *STORY)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"notice": {"lev')  # torn
    done = watch(run_dir)
    assert done.exit_code == 1
    assert "did not say how" in done.stdout and str(run_dir / "logs") in done.stdout


def test_a_run_that_never_began_is_over(run_dir: Path) -> None:
    assert watch(run_dir, "--json").exit_code == 1


def test_a_torn_line_in_the_middle_is_left_out_and_told(run_dir: Path) -> None:
    (run_dir / "events.jsonl").write_text('{"notice": {"lev\n')
    tell(run_dir, ended("finished"))
    done = watch(run_dir, "--json")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 1
    assert "no event" in done.stderr


def test_a_run_that_is_taken_up_again_is_followed_on(run_dir: Path) -> None:
    """The end of an earlier life is not that of the run while its processes were started anew since."""
    tell(run_dir, *STORY, ended("stopped"))
    file = run_dir / "processes" / "coordinator-0.yaml"
    file.parent.mkdir()
    file.write_text("")
    os.utime(run_dir / "events.jsonl", (1_000_000, 1_000_000))
    asked: list[int] = []

    def lives() -> bool:
        asked.append(1)
        if len(asked) == 3:
            tell(run_dir, ended("finished"))
        return True

    lines = follow._Lines(run_dir, lives)
    assert [item[1].WhichOneof("event") for item in lines if item is not None][-2:] == ["run_ended", "run_ended"]
    assert lines.outcome == "finished" and len(asked) == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no run, it has no manifest.json"),
        (lambda folder: folder.write_text(""), "no such folder"),
    ],
)
def test_a_folder_that_is_none_of_a_run(make: Any, said: str, tmp_path: Path) -> None:
    make(tmp_path / "other")
    done = watch(tmp_path / "other")
    assert done.exit_code == 2 and said in done.stderr and str(tmp_path / "other") in done.stderr
    told = json.loads(watch(tmp_path / "other", "--json").stderr)
    assert told["code"] == "ANT-NO-RUN" and said in told["what"]


def test_the_folder_above_the_runs_names_them(run_dir: Path) -> None:
    assert "runs in it: story" in watch(run_dir.parent).stderr


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`antiphon train` with stand-ins, which stays in the phase train until it is stopped."""
    recipe = write_recipe(tmp_path)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}", "STANDIN_COORDINATOR": "train"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.cli.standins.antiphon", "train", str(recipe)], cwd=tmp_path, env=environment,
        start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    yield process, environment
    process.kill()
    process.communicate()
    manifest = tmp_path / "runs" / "story" / "manifest.json"
    if manifest.exists():
        kill_processes(json.loads(manifest.read_text())["run_id"], 5.0)


def test_beside_a_run(training: tuple[subprocess.Popen[str], dict[str, str]], tmp_path: Path) -> None:
    """Two watch: Ctrl-C at one ends it and nothing else, the other sees the run to its end."""
    train, environment = training
    run_dir = tmp_path / "runs" / "story"
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step 1/2"):
            break
    watchers = [
        subprocess.Popen(
            [sys.executable, "-m", "services.cli", "watch", str(run_dir), *more], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for more in ([], ["--json"])
    ]  # fmt: skip
    try:
        plain, lines = watchers
        assert plain.stdout is not None
        for line in plain.stdout:
            if line.startswith("step 1/2"):
                break
        plain.send_signal(signal.SIGINT)
        assert plain.wait(10) == 130
        assert train.poll() is None
        train.send_signal(signal.SIGTERM)
        told, complaints = lines.communicate(timeout=30)
        train.communicate(timeout=30)
        assert (lines.returncode, complaints) == (3, "")
        assert told == (run_dir / "events.jsonl").read_text()
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.communicate()
