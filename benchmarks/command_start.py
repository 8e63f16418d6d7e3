"""How long the `antiphon` command takes to say something: each command's --help, reading a recipe, and a plan.

    python -m benchmarks.command_start [--runs 15] [--out FILE]

Each is a new interpreter; rounds go through all of them in turn, beside `python -c pass`, so that what else the machine
does is in all alike. Commands are those that the application has. Which heavy libraries were loaded is told by an extra
run, not timed. Writes benchmarks/results/command-start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.coordinator import table

TARGET_HELP_SECONDS = 0.3
TARGET_PLAN_SECONDS = 2.0
RUN_SECONDS = 60.0
PASS = "python -c pass"
READ = "read a recipe"
PLAN = "antiphon plan, 7.6 billion parameters without weights"
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
RECIPE = results.ROOT / "recipes" / "demo" / "addition.yaml"
HEAVY = (
    "torch",
    "vllm",
    "deepspeed",
    "transformers",
    "tokenizers",
    "datasets",
    "pandas",
    "pyarrow",
    "numpy",
    "grpc",
    "google.protobuf",
    "nats",
    "pydantic",
    "rich",
    "psutil",
    "math_verify",
)
READING = "from services.cli.recipe import read_recipe; read_recipe(pathlib.Path({path!r}), [], pathlib.Path({root!r}))"
# Told on a line of its own behind whatever the command printed.
TELL_MODULES = """
import json, pathlib, sys
try:
    {code}
except SystemExit as end:
    assert not end.code, end.code
print()
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""


def commands() -> list[str]:
    """Names of all commands of the application, sub-commands with their group before them."""
    import typer

    from services.cli.__main__ import app

    return sorted(_names(typer.main.get_command(app), ()))


def _names(command: Any, path: tuple[str, ...]) -> list[str]:
    found = [" ".join(path)] if path else []
    for name, inner in getattr(command, "commands", {}).items():
        found += _names(inner, (*path, name))
    return found


def cases(names: Sequence[str]) -> dict[str, list[str]]:
    """What is timed: its name, and the interpreter's arguments."""
    helps = {"antiphon --help": ["-m", "services.cli", "--help"]}
    helps |= {f"antiphon {name} --help": ["-m", "services.cli", *name.split(), "--help"] for name in names}
    return {PASS: ["-c", "pass"], **helps, READ: ["-c", f"import pathlib; {_reading()}"]}


def plan_case(folder: Path) -> list[str]:
    """The interpreter's arguments for a whole plan; recipe, data and a model's folder without weights are written."""
    (folder / "config.json").write_text(json.dumps(QWEN2_7B))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"prompt": "a", "reference": "b"}\n')
    tree = {
        "run": {"name": "plan", "directory": str(folder)},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "coordinator": {
            "steps": 10,
            "data": {"path": str(folder / "train.jsonl")},
            "sampling": {"max_tokens": 512},
            "prompts_per_step": 32,
            "samples_per_prompt": 8,
            "scorer": "exact",
        },
        "rollout": {"engine": "transformers"},
        "reward": {"scorers": [{"name": "exact", "type": "exact_match"}]},
        "learner": {},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))  # JSON is YAML
    return ["-m", "services.cli", "plan", str(folder / "recipe.yaml")]


def heavy_modules(arguments: Sequence[str]) -> list[str]:
    """Which of the heavy libraries are loaded when a case is over."""
    if arguments[0] == "-m":
        words = list(arguments[2:])
        code = f"sys.argv = ['antiphon', *{words!r}]; import {arguments[1]}.__main__ as command; command.main()"
    else:
        code = arguments[1]
    script = TELL_MODULES.format(code=code, heavy=HEAVY)
    found: list[str] = json.loads(_run(["-c", script]).splitlines()[-1])
    return found


def seconds_of(arguments: Sequence[str]) -> float:
    started = time.perf_counter()
    _run(arguments)
    return time.perf_counter() - started


def summarise(seconds: Mapping[str, Sequence[float]], modules: Mapping[str, list[str]]) -> dict[str, Any]:
    """Medians; over `python -c pass` as a difference in the same round."""
    rows: list[dict[str, Any]] = [
        {
            "what": name,
            "seconds": statistics.median(own),
            "seconds_highest": max(own),
            "over_pass_seconds": statistics.median(a - b for a, b in zip(own, seconds[PASS], strict=True)),
            "heavy_modules": modules[name],
        }
        for name, own in seconds.items()
    ]
    helps = [row["seconds"] for row in rows if row["what"].endswith("--help")]
    plan = statistics.median(seconds[PLAN])
    return {
        "by_case": rows,
        "target_help_seconds": TARGET_HELP_SECONDS,
        "slowest_help_seconds": max(helps),
        "target_plan_seconds": TARGET_PLAN_SECONDS,
        "plan_seconds": plan,
        "reached": max(helps) < TARGET_HELP_SECONDS and plan < TARGET_PLAN_SECONDS,
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How long the antiphon command takes to say something.")
    parser.add_argument("--runs", type=int, default=15, help="of each, after one that warms up")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "command-start.json")
    arguments = parser.parse_args(given)
    result = results.begin("command-start", {"runs": arguments.runs, "recipe": str(RECIPE.relative_to(results.ROOT))})
    with tempfile.TemporaryDirectory() as folder:
        every = {**cases(commands()), PLAN: plan_case(Path(folder))}
        _measure(arguments.runs, every, result)
    shown = [{**row, "heavy_modules": " ".join(row["heavy_modules"]) or "none"} for row in result.summary["by_case"]]
    print(f"{table(shown)}\nwritten to {results.write(result, arguments.out)}")


def _measure(runs: int, every: Mapping[str, list[str]], result: results.Result) -> None:
    modules = {name: heavy_modules(own) for name, own in every.items()}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(runs + 1):
        for name, own in every.items():
            took = seconds_of(own)
            if number:
                seconds[name].append(took)
    result.samples = {f"{name}, seconds": own for name, own in seconds.items()}
    result.summary = summarise(seconds, modules)


def _reading() -> str:
    return READING.format(path=str(RECIPE), root=str(results.ROOT))


def _run(arguments: Sequence[str]) -> str:
    """What it printed. Raises CalledProcessError when it failed."""
    environment = os.environ | {"PYTHONPATH": f"{results.ROOT}:{results.ROOT / 'protos'}"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=results.ROOT, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=True
    ).stdout


if __name__ == "__main__":
    main()
