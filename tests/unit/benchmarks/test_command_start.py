"""The start of commands is timed for every command there is, and told with what it loads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import command_start, results


def test_every_command_is_a_case() -> None:
    names = command_start.commands()
    assert "train" in names
    every = command_start.cases(["train", "data show"])
    assert every["antiphon --help"] == ["-m", "services.cli", "--help"]
    assert every["antiphon data show --help"] == ["-m", "services.cli", "data", "show", "--help"]
    assert next(iter(every)) == command_start.PASS


def test_modules_are_those_of_the_case() -> None:
    assert command_start.heavy_modules(["-c", "pass"]) == []
    assert command_start.heavy_modules(["-c", "import psutil"]) == ["psutil"]
    assert "torch" not in command_start.heavy_modules(["-m", "services.cli", "--help"])


def test_a_case_that_fails_is_no_number() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        command_start.seconds_of(["-c", "raise SystemExit(2)"])
    with pytest.raises(subprocess.CalledProcessError):
        command_start.heavy_modules(["-m", "services.cli", "no-such-command"])


@pytest.mark.parametrize(("slowest", "reached"), [(0.29, True), (0.3, False)])
def test_help_is_judged_by_the_slowest(slowest: float, reached: bool) -> None:
    seconds = {
        command_start.PASS: [0.1, 0.5, 0.1],
        "antiphon --help": [slowest, 0.9, slowest],
        command_start.READ: [9.0, 9.0, 9.0],
        command_start.PLAN: [1.9, 1.0, 3.0],
    }
    found = command_start.summarise(seconds, {key: [] for key in seconds})
    assert found["slowest_help_seconds"] == slowest
    assert found["reached"] is reached
    assert found["plan_seconds"] == 1.9
    assert not command_start.summarise({**seconds, command_start.PLAN: [2.0] * 3}, {k: [] for k in seconds})["reached"]
    assert found["by_case"][1]["over_pass_seconds"] == pytest.approx(min(slowest - 0.1, 0.4))


def test_the_command_writes_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_start.main(["--runs", "1", "--out", str(tmp_path / "command-start.json")])
    result = results.read(tmp_path / "command-start.json")
    assert result.samples["antiphon train --help, seconds"]
    assert result.samples[f"{command_start.PLAN}, seconds"]
    assert "read a recipe" in capsys.readouterr().out
