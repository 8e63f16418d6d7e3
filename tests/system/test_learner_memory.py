"""A real DeepSpeed engine goes on after Sleep and Wake as if nothing had been: the same bits, Step after Step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.learner.process import rank_environment
from tests.tiny.models import make_tiny_model

DEADLINE_SECONDS = 120.0
pytestmark = pytest.mark.timeout(180)


def run_ranks(folder, *, ranks: int, dtype: str, kind: str = "cpu") -> list[dict]:
    """What tests/system/sleeping_engine.py saw, rank by rank."""
    model = make_tiny_model(folder / "model", tied=ranks == 1, hidden=128 if kind == "cpu" else 1024)
    processes = []
    for rank in range(ranks):
        arguments = [str(model), dtype, str(ranks), str(rank), str(folder), kind]
        command = [sys.executable, "-m", "tests.system.sleeping_engine", *arguments]
        environment = rank_environment(1)
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def check(seen: dict) -> None:
    slept, awake = seen["slept"], seen["awake"]
    assert slept["metrics"] == awake["metrics"]
    assert slept["weights"] == awake["weights"]
    assert len({tuple(metrics) for metrics in slept["metrics"]}) > 1  # it did learn something
    assert min(slept["held"]) > 0 and slept["optimizer_bytes"] == slept["held"][1]
    assert slept["asleep"] == [slept["held"][0], 0]
    assert "nothing was taken" in slept["overloaded"] and "bytes are wanted on GPU-" in slept["overloaded"]


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "bfloat16"), pytest.param(2, "float32", marks=pytest.mark.slow)])
def test_a_step_after_sleep_is_the_step_that_would_have_been(tmp_path, ranks, dtype):
    for seen in run_ranks(tmp_path, ranks=ranks, dtype=dtype):
        check(seen)
