"""What the coordinator can take: trajectories per second through its ledger, and what it adds to a Step.

    python -m benchmarks.coordinator [--parts ledger,steps,work] [--rounds 3] [--folder DIR] [--results DIR]

`ledger` (benchmarks/ledger_writes.py) writes benchmarks/results/coordinator-ledger.json. Of Steps
(benchmarks/step_overhead.py) `steps` writes coordinator-steps.json, where the services answer at once, and `work`
coordinator-work.json, where they sample for 5 s and train for 2 s. Rounds are repeated as the machine may be busy with
other things: ratios are of one round, and every round is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ledger_writes, results, step_overhead

TARGET_PER_SECOND = 2000.0
SAMPLING_SECONDS, TRAINING_SECONDS = 5.0, 2.0
STEP_SECONDS = SAMPLING_SECONDS + TRAINING_SECONDS
"""Of a Step whose services work for real; the coordinator's share is of that."""
TARGET_SHARE = 0.02
SEED = 5
WARM_UP_STEPS = 2


def summarise_ledger(rounds: Sequence[ledger_writes.Round]) -> dict[str, Any]:
    per_second = [one.per_second for one in rounds]
    return {
        "trajectories_per_second": statistics.median(per_second),
        "trajectories_per_second_lowest": min(per_second),
        "target_per_second": TARGET_PER_SECOND,
        "reached": statistics.median(per_second) >= TARGET_PER_SECOND,
        "mean_message_bytes": rounds[0].message_bytes / rounds[0].trajectories,
        "plain_synced_write_seconds": statistics.median(one.disk_seconds / one.syncs for one in rounds),
        "seconds_over_plain_write": statistics.median(one.seconds / one.disk_seconds for one in rounds),
    }


def summarise_steps(rounds: Sequence[Sequence[step_overhead.Run]], work_seconds: float = 0.0) -> dict[str, Any]:
    """Of each number of workers the median over rounds; ratios to the first number, of the same round.

    `work_seconds` of each Step are the services' own: they are taken off, and the share is of them.
    """
    rows = []
    for at, first in enumerate(rounds[0]):
        runs = [one[at] for one in rounds]
        own = [run.median("time/step") - work_seconds for run in runs]
        without = [seconds - run.median("time/publish") for seconds, run in zip(own, runs, strict=True)]
        base = [one[0].median("time/step") - work_seconds for one in rounds]
        base_without = [seconds - one[0].median("time/publish") for seconds, one in zip(base, rounds, strict=True)]
        overhead = statistics.median(own)
        rows.append(
            {
                "workers": first.workers,
                "overhead_seconds": overhead,
                "ratio_to_first": statistics.median(a / b for a, b in zip(own, base, strict=True)),
                "share_of_a_step": overhead / (work_seconds or STEP_SECONDS),
                "without_publish_seconds": statistics.median(without),
                "without_publish_ratio": statistics.median(a / b for a, b in zip(without, base_without, strict=True)),
                "coordinator_cpu_seconds": statistics.median(run.coordinator_cpu_seconds for run in runs),
                "simulation_cpu_seconds": statistics.median(run.simulation_cpu_seconds for run in runs),
                **{
                    f"{stage}_seconds": statistics.median(run.median(f"time/{stage}") for run in runs)
                    for stage in ("generate", "score", "batch", "train", "publish")
                },
            }
        )
    return {
        "by_workers": rows,
        "a_step_seconds": work_seconds or STEP_SECONDS,
        "target_share": TARGET_SHARE,
        "reached": all(row["share_of_a_step"] <= TARGET_SHARE for row in rows),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under their keys, numbers to three digits."""
    cells = [list(rows[0])] + [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


async def _ledger(arguments: argparse.Namespace, folder: Path) -> results.Result:
    result = results.begin(
        "coordinator-ledger",
        {
            name: getattr(arguments, name)
            for name in ("rounds", "groups", "samples", "trajectory_tokens", "groups_at_once")
        }
        | {"seed": SEED},
    )
    groups = ledger_writes.make_groups(arguments.groups, arguments.samples, arguments.trajectory_tokens, SEED)
    rounds = []
    for number in range(arguments.rounds):
        own = folder / f"ledger-{number}"
        own.mkdir()
        rounds.append(await ledger_writes.measure(own, groups, arguments.groups_at_once))
        print(f"ledger, round {number}: {rounds[-1].per_second:,.0f} trajectories/s", flush=True)
    result.samples = {
        "trajectories_per_second": [one.per_second for one in rounds],
        "seconds": [one.seconds for one in rounds],
        "plain_write_seconds": [one.disk_seconds for one in rounds],
    }
    profiles = await ledger_writes.profile(folder, groups, arguments.groups_at_once)
    for thread, rows in profiles.items():
        result.samples[f"profile_of_the_{thread}_thread"] = rows
        print(f"the {thread} thread (profiled apart, which slows it down)\n{table(rows)}")
    result.summary = summarise_ledger(rounds)
    print(table([result.summary]))
    return result


async def _steps(arguments: argparse.Namespace, folder: Path) -> results.Result:
    shape = step_overhead.Shape(arguments.prompts, arguments.samples, arguments.tokens)
    return await _measure_steps("coordinator-steps", arguments, folder, shape)


async def _work(arguments: argparse.Namespace, folder: Path) -> results.Result:
    sizes = (arguments.prompts, arguments.samples, arguments.tokens)
    shape = step_overhead.Shape(*sizes, SAMPLING_SECONDS, TRAINING_SECONDS)
    return await _measure_steps("coordinator-work", arguments, folder, shape)


async def _measure_steps(
    name: str, arguments: argparse.Namespace, folder: Path, shape: step_overhead.Shape
) -> results.Result:
    result = results.begin(
        name,
        {name: getattr(arguments, name) for name in ("rounds", "workers", "steps", "prompts", "samples", "tokens")}
        | {
            "seed": SEED,
            "warm_up_steps": WARM_UP_STEPS,
            "simulation": "all simulated services in one process",
            "sampling_seconds": shape.sampling_seconds,
            "training_seconds": shape.training_seconds,
        },
    )
    rounds = []
    for number in range(arguments.rounds):
        runs = []
        for workers in arguments.workers:
            own = folder / f"{name}-{number}-{workers}"
            runs.append(
                await step_overhead.measure(
                    own, shape, workers=workers, steps=arguments.steps, warm_up=WARM_UP_STEPS, seed=SEED
                )
            )
            print(f"{name}, round {number}: {workers} workers, {runs[-1].median('time/step'):.3f} s", flush=True)
        rounds.append(runs)
    for at, workers in enumerate(arguments.workers):
        for stage in ("step", "publish"):
            result.samples[f"{stage}_seconds_with_{workers}"] = [
                [step[f"time/{stage}"] for step in one[at].steps] for one in rounds
            ]
    result.summary = summarise_steps(rounds, shape.work_seconds)
    print(table(result.summary["by_workers"]))
    return result


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the coordinator can take.")
    parser.add_argument("--parts", default="ledger,steps,work", help="of ledger, steps, work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8, help="of one prompt")
    parser.add_argument("--groups", type=int, default=1024, help="ledger: written in a round")
    parser.add_argument("--groups-at-once", type=int, default=32, help="ledger: under way, as in a Step of so many")
    parser.add_argument("--trajectory-tokens", type=int, default=1024, help="ledger: prompt and answer")
    parser.add_argument("--prompts", type=int, default=32, help="steps: of one Step")
    parser.add_argument("--tokens", type=int, default=1024, help="steps: of each answer")
    parser.add_argument("--steps", type=int, default=6, help=f"steps: counted, after {WARM_UP_STEPS} that warm up")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--folder", type=Path, help="an empty one on the disk to be measured; default: a temporary one")
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    arguments = parser.parse_args(given)
    parts = {"ledger": _ledger, "steps": _steps, "work": _work}
    wanted = arguments.parts.split(",")
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"--parts: expected some of {', '.join(parts)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for part in wanted:
            result = asyncio.run(parts[part](arguments, Path(name)))
            print(f"written to {results.write(result, arguments.results / f'{result.name}.json')}")


if __name__ == "__main__":
    main()
