"""What a handoff costs the engine: seconds and bytes of sleep and wake, and whether memory stays flat over cycles.

    python -m benchmarks.engine_handoff [--shape 3b] [--cycles 50] [--kv-gib 20] [--graphs] [--out FILE]

One GPU; the rollout service's own objects behind its gRPC server, in this process, with a guard that lets all calls
through. The weights are random and come from a learner of one rank on the same GPU, by CUDA IPC. Measured: level 1
(weights kept in host memory; the first time pins that memory), then `--cycles` times level 2 as the hybrid schedule has
it: sleep with weights discarded, wake the weights, publish (whose commit wakes keys and values), generate. Free memory
is the driver's, host memory the engine processes' resident size. Writes benchmarks/results/engine-handoff.json.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import psutil
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS
from antiphon.types.v1.trajectory_pb2 import PromptId

from benchmarks import results
from benchmarks.one_rank_learner import SHAPES, OneRankLearner, write_model
from benchmarks.rollout_processes import in_this_process, process_config
from services.common.client import new_request_id
from services.common.config import ModelConfig
from services.coordinator.clients import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.gpus import engine_gpus
from services.rollout.rollout import Rollout

LIMIT_SECONDS = 420.0  # of everything
CALL_SECONDS = 60.0
SAMPLES, TOKENS = 16, 32
SETTLED = 3  # cycles after which memory should not move any more
FLAT_SHARE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description="Sleep, wake and refill of the engine, measured.")
    parser.add_argument("--shape", choices=[*SHAPES], default="3b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on CPU")
    parser.add_argument("--kv-gib", type=float, default=20.0)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: a minute more until the engine is up")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "engine-handoff.json")
    arguments = parser.parse_args()
    on_gpu = bool(engine_gpus())
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    result = results.begin(
        "engine-handoff",
        {
            **{name: value for name, value in vars(arguments).items() if name != "out"},
            "weights": "random, by seed; refilled " + ("by CUDA IPC" if on_gpu else "over gloo: no GPU, states only"),
            "generated_in_each_cycle": [SAMPLES, TOKENS],
        },
    )
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(_measure(arguments, Path(name), result, on_gpu))
    print(f"{result.summary}\nwritten to {results.write(result, arguments.out)}")


async def _measure(arguments: argparse.Namespace, folder: Path, result: results.Result, on_gpu: bool) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        path = write_model(folder / "model", arguments.shape, arguments.dtype)
        settings = RolloutConfig(
            max_sequence_tokens=1024, kv_cache_gib=arguments.kv_gib, eager=not arguments.graphs, prefix_cache=False
        )
        model = ModelConfig(path=str(path), dtype=arguments.dtype)
        begin = time.monotonic()
        async with in_this_process(process_config(model, settings, folder, shares_gpus=True)) as (client, rollout):
            result.summary["engine_up_seconds"] = time.monotonic() - begin
            print(f"the engine is up after {time.monotonic() - begin:.1f} s", flush=True)
            learner = OneRankLearner(path, dtype=arguments.dtype, device="cuda" if on_gpu else "cpu", seed=0)
            handoff = Handoff(client, rollout, learner, result)
            await handoff.publish()
            await handoff.generate()
            await handoff.level_1(3)
            await handoff.level_2(arguments.cycles)
            learner.close()
    _summarise(result, learner.bytes)


class Handoff:
    """Drives one engine and writes down what it answers."""

    def __init__(
        self, client: RolloutClient, rollout: Rollout, learner: OneRankLearner, result: results.Result
    ) -> None:
        self._client = client
        self._rollout = rollout
        self._learner = learner
        self._samples = result.samples
        self._version = -1
        self._calls = 0

    async def publish(self) -> None:
        self._version += 1
        publication = await self._learner.publish(self._client, self._version)
        self._note("publish_total_seconds", publication.total_seconds)
        self._note("publish_send_seconds", publication.send_seconds)
        self._note("publish_pause_seconds", publication.committed.pause_seconds)
        self._note("publish_probe_seconds", publication.committed.probe_seconds)
        self._note("publish_extra_bytes", publication.committed.extra_bytes)

    async def generate(self) -> None:
        self._calls += 1
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=PromptId(dataset="benchmark", row=self._calls),
            prompt_token_ids=range(100, 164),
            samples=SAMPLES,
            sampling=rollout_pb2.Sampling(temperature=1.0, max_tokens=TOKENS),
            policy_version=self._version,
        )
        begin = time.monotonic()
        async with aclosing(self._client.generate(request, CALL_SECONDS)) as trajectories:
            count = [len(trajectory.token_ids) async for trajectory in trajectories]
        if count != [64 + TOKENS] * SAMPLES:
            raise RuntimeError(f"{SAMPLES} trajectories of {TOKENS} sampled tokens were asked for, got {count}")
        self._note("generate_seconds", time.monotonic() - begin)

    async def level_1(self, times: int) -> None:
        for number in range(times):
            first = "_first" if number == 0 else ""
            await self._sleep(f"level_1{first}", discard=False)
            await self._wake(f"level_1{first}_weights", MEMORY_TAG_WEIGHTS)
            await self._wake(f"level_1{first}_kv_and_probe", MEMORY_TAG_KV)
            await self.generate()
        print("level 1 is done", flush=True)

    async def level_2(self, cycles: int) -> None:
        for number in range(cycles):
            await self._sleep("level_2", discard=True)
            await self._look("asleep")
            await self._wake("level_2_weights", MEMORY_TAG_WEIGHTS)
            await self.publish()
            await self.generate()
            await self._look("awake")
            if number % 10 == 0:
                print(f"cycle {number}: {self._last('level_2_sleep_seconds'):.3f} s asleep", flush=True)

    async def _sleep(self, name: str, *, discard: bool) -> None:
        request = tenant_pb2.SleepRequest(
            request_id=new_request_id(), discard_weights=discard, deadline_seconds=CALL_SECONDS
        )
        begin = time.monotonic()
        answer = await self._client.sleep(request, CALL_SECONDS)
        self._note(f"{name}_sleep_seconds", answer.seconds)
        self._note(f"{name}_sleep_call_seconds", time.monotonic() - begin)
        self._note(f"{name}_freed_bytes", sum(d.free_bytes_after - d.free_bytes_before for d in answer.devices))

    async def _wake(self, name: str, tag: int) -> None:
        request = tenant_pb2.WakeRequest(request_id=new_request_id(), tags=[tag], deadline_seconds=CALL_SECONDS)
        begin = time.monotonic()
        answer = await self._client.wake(request, CALL_SECONDS)
        self._note(f"{name}_wake_seconds", answer.seconds)
        self._note(f"{name}_wake_call_seconds", time.monotonic() - begin)
        self._note(f"{name}_taken_bytes", sum(d.free_bytes_before - d.free_bytes_after for d in answer.devices))

    async def _look(self, when: str) -> None:
        state = await self._client.state()
        self._note(f"{when}_device_free_bytes", sum(device.free_bytes for device in state.devices))
        self._note(f"{when}_device_used_bytes", sum(d.total_bytes - d.free_bytes for d in state.devices))
        engines = self._rollout.engine.info.pids
        self._note(f"{when}_host_bytes", sum(psutil.Process(pid).memory_info().rss for pid in engines))

    def _note(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(value)

    def _last(self, name: str) -> float:
        return float(self._samples[name][-1])


def _summarise(result: results.Result, weight_bytes: int) -> None:
    samples = result.samples
    summary = result.summary
    summary["weight_bytes"] = weight_bytes
    for name, values in samples.items():
        if name.endswith("_seconds"):
            summary[f"{name}_median"] = statistics.median(values)
            summary[f"{name}_highest"] = max(values)
    for name in ("level_1", "level_1_first", "level_2"):
        freed, seconds = samples[f"{name}_freed_bytes"], samples[f"{name}_sleep_seconds"]
        summary[f"{name}_freed_bytes"] = statistics.median(freed)
        rates = [size / took / 1e9 for size, took in zip(freed, seconds, strict=True)]
        summary[f"{name}_sleep_gb_per_second"] = statistics.median(rates)
    for name in ("asleep_device_used_bytes", "awake_device_used_bytes", "asleep_host_bytes", "awake_host_bytes"):
        settled = samples[name][SETTLED:]
        summary[f"{name}_drift"] = drift = _drift(settled)
        summary[f"{name}_flat"] = abs(drift) <= FLAT_SHARE * max(statistics.median(settled or [1]), 1)
    summary["asleep_device_used_bytes"] = statistics.median(samples["asleep_device_used_bytes"])


def _drift(values: Sequence[float]) -> float:
    """What a line fitted to the values rises by from the first to the last."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)


if __name__ == "__main__":
    main()
