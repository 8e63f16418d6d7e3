"""`antiphon samples`: what a run sampled and how it was scored, while it runs or afterwards.

Training's samples are in the ledger, which the coordinator's own module reads, as a process; answers to held-out
prompts are lines in evaluations/.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.cli.recipe import read_recipe
from services.cli.subject import find_run_folder
from services.cli.told import NoSamples, said_by_process
from services.common.errors import ConfigError, NotFound, Unavailable

MODULE = "services.coordinator.samples"
READ_SECONDS = 300.0
SHOWN = 10


def samples(
    run: Path, *, step: int | None, best: int | None, worst: int | None, everything: bool
) -> list[dict[str, Any]]:
    """Of a Step, or the newest one; the best or worst are looked for in the whole run where no Step is named.

    Raises NoRun, NoSamples, ConfigError.
    """
    run_dir = find_run_folder(run)
    if not (run_dir / "run.db").is_file():
        raise NoSamples(f"{run_dir}: there is no run.db: the run has sampled nothing yet")
    recipe = read_recipe(run_dir / "recipe.yaml", [])
    pick, count = _picked(best, worst, everything)
    command = [sys.executable, "-m", MODULE, "--model", recipe.model.path, "--ledger", str(run_dir / "run.db")]
    command += ["--pick", pick, "--count", str(count)]
    if step is not None:
        command += ["--step", str(step)]
    elif pick == "first":
        command += ["--newest-step"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=READ_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{run_dir / 'run.db'}: not read within {READ_SECONDS:.0f} s") from None
    if done.returncode != 0:
        error = said_by_process(done.stderr)
        raise NoSamples(str(error)) if isinstance(error, NotFound) else error
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if not found:
        raise NoSamples(f"{run_dir}: nothing was sampled yet")
    return found


def heldout(
    run: Path, *, step: int | None, best: int | None, worst: int | None, everything: bool
) -> list[dict[str, Any]]:
    """Answers to held-out prompts by the policy after a Step, or by the newest that was evaluated; every data set.

    Raises NoRun, NoSamples.
    """
    run_dir = find_run_folder(run)
    files: dict[int, list[tuple[str, Path]]] = {}
    for path in sorted((run_dir / "evaluations").glob("*.jsonl")):
        match = re.fullmatch(r"(.+)-v(\d+)\.jsonl", path.name)
        if match:
            files.setdefault(int(match[2]), []).append((match[1], path))
    if not files:
        raise NoSamples(f"{run_dir / 'evaluations'}: no policy was evaluated yet, or the recipe has no evaluation")
    version = max(files) if step is None else step
    if version not in files:
        there = ", ".join(map(str, sorted(files)))
        raise NoSamples(f"{run_dir / 'evaluations'}: none of policy {version}; there are those of {there}")
    found = []
    for dataset, path in files[version]:
        try:
            found += [{"dataset": dataset, **json.loads(line)} for line in path.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    pick, count = _picked(best, worst, everything)
    if pick != "first":
        sign = -1.0 if pick == "best" else 1.0
        found.sort(key=lambda line: (line["score"] is None, sign * (line["score"] or 0.0)))
    return found[:count] if count else found


def as_text(found: list[dict[str, Any]]) -> str:
    return "\n\n".join(_told(sample) for sample in found)


def _told(sample: dict[str, Any]) -> str:
    if "dataset" in sample:
        head = f"{sample['dataset']}, row {sample['row']}, policy {sample['policy_version']}"
    else:
        step = "in no Step yet" if sample["step"] is None else f"step {sample['step']}"
        versions = ", ".join(map(str, sample["policy_versions"]))
        head = f"{sample['trajectory_id']}, {step}, policy {versions}"
    facts = [f"score {sample['score']:.4g}" if sample["score"] is not None else "no score"]
    facts += [f"{name} {value:.4g}" for name, value in sample.get("parts", {}).items()]
    if sample.get("advantage") is not None:
        facts.append(f"advantage {sample['advantage']:.4g}")
    facts.append(f"{sample['tokens']} tokens, {sample['finish_reason'].removeprefix('FINISH_REASON_').lower()}")
    lines = [f"{head}: {', '.join(facts)}", f"  prompt:   {_quoted(sample['prompt'])}"]
    lines.append(f"  response: {_quoted(sample['response'])}")
    if sample.get("reference"):
        lines.append(f"  expected: {_quoted(sample['reference'])}")
    if sample["failure"]:
        lines.append(f"  failure:  {sample['failure']}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _picked(best: int | None, worst: int | None, everything: bool) -> tuple[str, int]:
    given = [name for name, value in (("--best", best), ("--worst", worst), ("--all", everything or None)) if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: one of them at a time")
    if best is not None:
        return "best", best
    if worst is not None:
        return "worst", worst
    return "first", 0 if everything else SHOWN
