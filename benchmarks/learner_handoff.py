"""The learner's half of a handoff on one GPU: its state to the host and back, many times. A 3B shape, minutes.

    PYTHONPATH=.:protos python -m benchmarks.learner_handoff --results FOLDER

The engine is the trainer's, after one Step. A cycle is: optimizer sleeps, weights sleep, weights wake, optimizer wakes;
bytes are what the tag holds on the GPU, and what of it travels. Nobody else uses the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import results

ENOUGH_SECONDS = 150.0
"""No cycle begins later than so many seconds after the start."""
FLAT = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder for learner-handoff.json")
    parser.add_argument("--shape", default="3b")
    parser.add_argument("--cycles", type=int, default=50)
    arguments = parser.parse_args()
    begin = time.monotonic()
    result = results.begin("learner-handoff", {"shape": arguments.shape, "cycles": arguments.cycles})
    try:
        _measure(result, arguments.shape, arguments.cycles, begin + ENOUGH_SECONDS)
        _summarise(result)
    finally:
        arguments.results.mkdir(parents=True, exist_ok=True)
        print(results.write(result, arguments.results / "learner-handoff.json"))
        print(json.dumps(result.summary, indent=1))
        for name in ("start", "steps", "failures"):
            print(name, json.dumps(result.samples.get(name, [])))
    return 0


def _measure(result: results.Result, shape: str, cycles: int, end: float) -> None:
    import torch
    from antiphon.types.v1 import grant_pb2

    from benchmarks import learner_engine
    from services.learner.device_memory import DeviceMemory

    device = learner_engine.join()
    rank = learner_engine.make_rank(shape, device, checkpointing=True, micro_batch_tokens=8192)
    batch = learner_engine.make_batch(16_384, 8192, rank.policy.model.config.vocab_size)
    samples = result.samples
    samples["steps"], samples["cycles"] = [], []

    def step(number: int) -> None:
        metrics = rank.runner.run(learner_engine.make_header(number, batch), batch, learner_engine.silent).updates[0]
        samples["steps"].append({"loss": metrics.loss, "gradient_norm": metrics.gradient_norm})
        print("step", number, samples["steps"][-1], flush=True)

    step(1)
    memory = DeviceMemory(rank.engine, device)
    began = time.monotonic()
    memory.prepare()
    pinned = {str(tag): arena.bytes.numel() for tag, arena in memory._arenas.items()}
    samples["start"] = [
        {
            "seconds_to_load": rank.seconds_to_load,
            "seconds_to_start": rank.seconds_to_start,
            "seconds_to_pin": time.monotonic() - began,
            "pinned_bytes": sum(pinned.values()),
            "rss_bytes": _rss_bytes(),
            "digest_seconds": _seconds(memory._weights_digest),
        }
    ]
    print(json.dumps(samples["start"]), flush=True)
    tags = {"optimizer": grant_pb2.MEMORY_TAG_OPTIMIZER, "weights": grant_pb2.MEMORY_TAG_WEIGHTS}
    travels = {
        name: sum(block.size_bytes for block in memory._blocks(tag) if block.kept_at is not None)
        for name, tag in tags.items()
    }
    held = {part.tag: part.bytes for part in memory.held().held}
    for number in range(cycles):
        if time.monotonic() > end:
            samples["failures"] = [f"only {number} cycles fitted into the time"]
            break
        cycle: dict[str, Any] = {}
        for name, tag in tags.items():
            change = memory.sleep([tag])
            cycle[f"sleep_{name}_seconds"] = change.seconds
            cycle[f"sleep_{name}_freed_bytes"] = change.device.free_bytes_after - change.device.free_bytes_before
        cycle["free_bytes_asleep"] = torch.cuda.mem_get_info(device)[0]
        for name, tag in reversed(tags.items()):
            cycle[f"wake_{name}_seconds"] = memory.wake([tag]).seconds
        cycle["free_bytes_awake"] = torch.cuda.mem_get_info(device)[0]
        cycle["rss_bytes"] = _rss_bytes()
        samples["cycles"].append(cycle)
        if number % 10 == 0:
            print(number, json.dumps(cycle), flush=True)
    step(2)
    result.parameters |= {
        "travelling_bytes": travels,
        "held_bytes": {name: held[tag] for name, tag in tags.items()},
        "seconds": "of the copies and of taking or giving back memory; the weights' digest, computed at each sleep and "
        "wake of them, is told apart as digest_seconds",
    }


def _summarise(result: results.Result) -> None:
    cycles = result.samples["cycles"]
    travelling, held = result.parameters["travelling_bytes"], result.parameters["held_bytes"]
    for name in ("optimizer", "weights"):
        for what in ("sleep", "wake"):
            seconds = statistics.median(cycle[f"{what}_{name}_seconds"] for cycle in cycles[1:])
            result.summary[f"{what}_{name}"] = {
                "seconds_median": round(seconds, 4),
                "seconds_max": round(max(cycle[f"{what}_{name}_seconds"] for cycle in cycles[1:]), 4),
                "gb_per_s": round(travelling[name] / seconds / 1e9, 1),
                "gb": round(travelling[name] / 1e9, 2),
                "gb_of_gpu_memory": round(held[name] / 1e9, 2),
            }
    back = sum(result.summary[f"wake_{name}"]["seconds_median"] for name in ("optimizer", "weights"))
    result.summary["wake_all_gb_per_s"] = round(sum(travelling.values()) / back / 1e9, 1)
    for name in ("free_bytes_asleep", "free_bytes_awake", "rss_bytes"):
        values = [cycle[name] for cycle in cycles[2:]]
        change = (values[-1] - values[0]) / values[0]
        result.summary[name] = {
            "first": values[0], "last": values[-1], "change": round(change, 5), "flat": abs(change) <= FLAT
        }  # fmt: skip
    result.summary["cycles"] = len(cycles)


def _rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _seconds(work: Any) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


if __name__ == "__main__":
    sys.exit(main())
