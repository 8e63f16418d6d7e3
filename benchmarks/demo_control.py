"""Does the demo learn from its rewards? The demo's recipe, and the same steps and seed with shuffled rewards.

    python -m benchmarks.demo_control [--dtype float32] [KEY.PATH=VALUE ...]

Needs what `make demo` prepares. Writes benchmarks/results/demo-cpu.json: both gains on the held-out prompts with their
95 % bounds, and the score of the exported policy by plain transformers. Exit code 1 unless the gain is at least 0.15
with p < 0.01, the upper bound of the control's gain is under a quarter of it, and transformers agrees within 0.02.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import results
from benchmarks.score_export import TOLERANCE, score_export
from recipes.demo import report

RECIPE = results.ROOT / "recipes" / "demo" / "addition.yaml"
RUN_SECONDS = 3600
CONTROLS = ("none", "shuffled_rewards")


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo and its control with shuffled rewards.")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: what suits this machine")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "demo-cpu.json")
    parser.add_argument("assignments", nargs="*", metavar="KEY.PATH=VALUE", help="changes to the recipe, for both runs")
    arguments = parser.parse_args()
    dtype = arguments.dtype or _pick_dtype()
    assignments = [f"model.dtype={dtype}", *arguments.assignments]
    result = results.begin("demo-cpu", {"recipe": yaml.safe_load(RECIPE.read_text()), "assignments": assignments})
    stamp = time.strftime("%m%d-%H%M%S")
    runs = {
        control: _train(control, f"control-{stamp}-{control.replace('_', '-')}", assignments) for control in CONTROLS
    }
    exported = score_export(runs["none"])
    for control, run_dir in runs.items():
        outcome = report.read_outcome(run_dir)
        gain = report.paired_bootstrap(outcome.before, outcome.after)
        print(f"\n{control}\n{report.describe(outcome, gain)}")
        result.samples[f"{control}/score_before"] = outcome.before
        result.samples[f"{control}/score_after"] = outcome.after
        result.samples[f"{control}/step_seconds"] = _column(run_dir, "time/step")
        result.samples[f"{control}/reward"] = _column(run_dir, "reward")
        result.summary[control] = {
            "prompts": len(outcome.before),
            "unscored": outcome.unscored,
            "score_before": sum(outcome.before) / len(outcome.before),
            "score_after": sum(outcome.after) / len(outcome.after),
            "gain": gain.mean,
            "gain_low_95": gain.low,
            "gain_high_95": gain.high,
            "p": gain.p,
            "run_seconds": outcome.run_seconds,
            "peak_memory_gib_pss": outcome.peak_memory_mib / 1024,
        }
    result.samples["exported/score_by_transformers"] = exported.scores
    result.summary["exported"] = {"score_by_transformers": exported.mean, "score_by_the_run": exported.reported_mean}
    result.summary["holds"] = judge(result.summary)
    print(f"\nwritten: {results.write(result, arguments.out)}\nholds: {result.summary['holds']}")
    if not all(result.summary["holds"].values()):
        sys.exit("demo_control: a claim does not hold")


def judge(summary: dict[str, Any]) -> dict[str, bool]:
    """Each claim, and whether it holds."""
    real, control, exported = summary["none"], summary["shuffled_rewards"], summary["exported"]
    return {
        "gain at least 0.15, p < 0.01": real["gain"] >= report.WANTED_GAIN and real["p"] < report.WANTED_P,
        "upper bound of the control's gain under a quarter of the gain": control["gain_high_95"] < real["gain"] / 4,
        "transformers agrees within 0.02": abs(exported["score_by_transformers"] - exported["score_by_the_run"])
        <= TOLERANCE,
    }


def _pick_dtype() -> str:
    command = [sys.executable, str(RECIPE.with_name("pick_dtype.py"))]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout.strip()


def _train(control: str, name: str, assignments: list[str]) -> Path:
    """One run; answers its folder."""
    command = [sys.executable, "-m", "services.cli", "train", str(RECIPE), f"run.name={name}", *assignments]
    command.append(f"coordinator.algorithm.control={control}")
    subprocess.run(command, cwd=results.ROOT, timeout=RUN_SECONDS, check=True)
    return results.ROOT / "runs" / name


def _column(run_dir: Path, name: str) -> list[float]:
    """A number of each Step, in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


if __name__ == "__main__":
    main()
