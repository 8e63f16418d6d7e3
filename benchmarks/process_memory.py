"""What the processes of a run take by themselves, libraries mostly: a run whose model is next to nothing.

    python -m benchmarks.process_memory [--steps 2] [--out FILE]

`antiphon train` with each engine, a reference model, and a model of 0.4 million parameters, 16 MiB of keys and values
and buckets of 1 MiB. Of each process the highest resident set size (VmHWM of /proc/<pid>/status) is looked at until it
ends: pages that it shares with others are counted in full, so the sum over processes is a bound. Writes
benchmarks/results/process-memory.json, by which services/cli/plan_memory.py counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.coordinator import table
from services.cli.run_processes import command_of, find_processes, parent_of
from tests.tiny import models, task

ENGINES = ("vllm", "transformers")
RUN_SECONDS = 400.0
LOOK_SECONDS = 0.2
KINDS = (
    ("NATS", r"nats-server"),
    ("command", r"services\.cli"),
    ("coordinator", r"-m services\.coordinator"),
    ("reference model", r"services\.reward\.reference_child"),
    ("scorer", r"services\.reward\.child"),
    ("reward worker", r"-m services\.reward"),
    ("rank of the learner", r"rank_main"),
    ("learner", r"-m services\.learner"),
    ("helper of the engine", r"resource_tracker|forkserver"),
    ("{engine} engine", r"VLLM::|multiprocessing\.spawn|EngineCore"),
    ("rollout worker of {engine}", r"-m services\.rollout"),
)
"""Name and what its command line has; the first that fits."""
OTHERS = "others"
"""A compiler that a library tries, and the like: gone long before a run takes its most."""


def kind_of(command: str, engine: str) -> str:
    """OTHERS for a program that is none of ours. Raises RuntimeError for one of ours that would not be counted."""
    for name, pattern in KINDS:
        if re.search(pattern, command):
            return name.format(engine={"vllm": "vLLM"}.get(engine, engine))
    if "python" not in command.partition(" ")[0]:
        return OTHERS
    raise RuntimeError(f"a process of no kind that is known here: {command}")


def recipe(folder: Path, engine: str, steps: int) -> Path:
    """A run of the tiny model; the file and what it names are in the folder."""
    training, _ = task.make_examples()
    task.write_jsonl(folder / "train.jsonl", training)
    models.make_tiny_model(folder / "model")
    tree: dict[str, Any] = {
        "run": {"name": "memory", "seed": 3, "directory": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "coordinator": {
            "steps": steps,
            "data": {"path": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
            "sampling": {"max_tokens": task.MAX_ANSWER_TOKENS},
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "scorer": "exact",
            "publication": {"bucket_mib": 1},
        },
        "rollout": {"engine": engine, "max_sequence_tokens": 64, "kv_cache_gib": 1 / 64},
        "reward": {
            "scorers": [{"name": "exact", "path": str(task.REWARD_FILE)}, {"name": "math", "type": "math"}],
            "reference": {},
        },
        "learner": {},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def measure(folder: Path, engine: str, steps: int) -> dict[str, list[float]]:
    """MiB of each process of the run, by kind. Raises RuntimeError when the run fails."""
    path, log = recipe(folder, engine, steps), folder / "output.txt"
    environment = os.environ | {"PYTHONPATH": f"{results.ROOT}:{results.ROOT / 'protos'}"}
    command = [sys.executable, "-m", "services.cli", "train", str(path)]
    highest: dict[int, tuple[str, float]] = {}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=results.ROOT, env=environment, stdout=stream, stderr=stream)
        try:
            end = time.monotonic() + RUN_SECONDS
            while process.poll() is None and time.monotonic() < end:
                for pid in {process.pid, *_processes(folder)}:
                    if (seen := _peak_mib(pid)) is not None:
                        highest[pid] = (_named(pid), seen)
                time.sleep(LOOK_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    if process.returncode != 0:
        raise RuntimeError(f"the run with {engine} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    kinds: dict[str, list[float]] = {}
    for command_line, mib in highest.values():
        kinds.setdefault(kind_of(command_line, engine), []).append(round(mib, 1))
    return kinds


def _processes(folder: Path) -> list[int]:
    """Of the run in the folder, as its manifest names it."""
    manifest = folder / "memory" / "manifest.json"
    try:
        return find_processes(json.loads(manifest.read_text())["run_id"])
    except (OSError, ValueError):  # not there yet, or half written
        return []


def _named(pid: int) -> str:
    """Its command line; of a process that has just been forked, that of the parent."""
    return command_of(pid) or command_of(parent_of(pid))


def _peak_mib(pid: int) -> float | None:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="What the processes of a run take by themselves.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=results.FOLDER / "process-memory.json")
    arguments = parser.parse_args()
    result = results.begin("process-memory", {"steps": arguments.steps, "engines": list(ENGINES), "parameters": 0.4e6})
    seen: dict[str, list[float]] = {}
    for engine in ENGINES:
        with tempfile.TemporaryDirectory() as name:
            for kind, peaks in measure(Path(name), engine, arguments.steps).items():
                seen.setdefault(kind, []).extend(peaks)
    result.samples = {f"{kind}, MiB": peaks for kind, peaks in seen.items()}
    result.summary = {"highest_mib": {kind: max(peaks) for kind, peaks in seen.items() if kind != OTHERS}}
    print(table([{"kind": kind, "processes": len(peaks), "MiB": max(peaks)} for kind, peaks in seen.items()]))
    print(f"written to {results.write(result, arguments.out)}")


if __name__ == "__main__":
    main()
