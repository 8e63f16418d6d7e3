"""Says what a run of the demo reached, from its own files: held-out score before and after, and how sure that is.

    python recipes/demo/report.py RUN_DIR

Exit code 1 when the gain is under 0.15 or could be chance (p of the paired bootstrap 0.01 or more).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WANTED_GAIN = 0.15
WANTED_P = 0.01
RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class Gain:
    """Difference of two scores on the same prompts."""

    mean: float
    low: float
    """Lower bound of the central 95 % of the resampled means."""
    high: float
    p: float
    """One-sided: share of resampled means that are 0 or less, counting the observed sample as one more."""


def paired_bootstrap(before: list[float], after: list[float], resamples: int = RESAMPLES, seed: int = SEED) -> Gain:
    """Resamples prompts, each with both of its scores. Needs two lists of one length, in one order."""
    if len(before) != len(after) or not before:
        raise ValueError(f"expected two scores for each prompt, got {len(before)} and {len(after)}")
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(differences), size=(resamples, len(differences)))
    means = differences[chosen].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    p = (1 + int((means <= 0).sum())) / (resamples + 1)
    return Gain(float(differences.mean()), float(low), float(high), p)


@dataclass(frozen=True)
class Outcome:
    """What a run's files say."""

    versions: tuple[int, int]
    before: list[float]
    after: list[float]
    unscored: int
    """Prompts without a score at either end; they are left out of both."""
    run_seconds: float
    peak_memory_mib: float
    memory_at_peak_mib: dict[str, float]
    export: Path | None


def read_outcome(run_dir: Path, dataset: str = "heldout") -> Outcome:
    """Raises ValueError saying which file is not there."""
    files = {int(p.stem.rpartition("-v")[2]): p for p in (run_dir / "evaluations").glob(f"{dataset}-v*.jsonl")}
    if len(files) < 2:
        raise ValueError(f"{run_dir}/evaluations: expected {dataset} at the start and at the end, got {sorted(files)}")
    first, last = min(files), max(files)
    before, after = _scores(files[first]), _scores(files[last])
    if before.keys() != after.keys():
        raise ValueError(f"{files[first]} and {files[last]} are about different prompts")
    rows = [row for row in sorted(before) if before[row] is not None and after[row] is not None]
    samples = [json.loads(line) for line in (run_dir / "memory.jsonl").read_text().splitlines()]
    peak = max(samples, key=lambda sample: float(sample["total_mib"]))
    export = run_dir / "export" / f"policy-{last}"
    return Outcome(
        versions=(first, last),
        before=[before[row] or 0.0 for row in rows],
        after=[after[row] or 0.0 for row in rows],
        unscored=len(before) - len(rows),
        run_seconds=samples[-1]["time"] - samples[0]["time"],
        peak_memory_mib=peak["total_mib"],
        memory_at_peak_mib=peak["workers"],
        export=export if export.is_dir() else None,
    )


def _scores(path: Path) -> dict[int, float | None]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["row"]: line["score"] for line in lines}


def describe(outcome: Outcome, gain: Gain) -> str:
    first, last = outcome.versions
    minutes, seconds = divmod(round(outcome.run_seconds), 60)
    shares = sorted(outcome.memory_at_peak_mib.items(), key=lambda item: -item[1])
    lines = [
        ("held-out prompts", f"{len(outcome.before)}" + (f", {outcome.unscored} unscored" if outcome.unscored else "")),
        (f"greedy score, version {first}", f"{np.mean(outcome.before):.3f}"),
        (f"greedy score, version {last}", f"{np.mean(outcome.after):.3f}"),
        ("gain", f"{gain.mean:+.3f} (95 % between {gain.low:+.3f} and {gain.high:+.3f}; wanted {WANTED_GAIN:+.2f})"),
        ("paired bootstrap", f"p = {gain.p:.4f} ({RESAMPLES:,} resamples; wanted under {WANTED_P})"),
        ("time of the run", f"{minutes} min {seconds:02d} s"),
        (
            "memory, all processes",
            f"{outcome.peak_memory_mib / 1024:.1f} GiB at its peak (PSS: "
            f"{', '.join(f'{name} {mib / 1024:.1f}' for name, mib in shares)})",
        ),
        ("exported policy", str(outcome.export or "none")),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in lines)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: report.py RUN_DIR")
    try:
        outcome = read_outcome(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"report: {error}")
    gain = paired_bootstrap(outcome.before, outcome.after)
    print(describe(outcome, gain))
    if gain.mean < WANTED_GAIN or gain.p >= WANTED_P:
        sys.exit("report: the model did not learn what the demo promises")


if __name__ == "__main__":
    main()
