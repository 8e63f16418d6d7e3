"""A learner and an engine that share one GPU under real grants: what each hand-over costs, and whether memory is flat.

    PYTHONPATH=.:protos python -m benchmarks.handoff [--shape 3b] [--cycles 50] [--limit-seconds 240] [--out FILE]

NATS, `python -m services.learner` and `python -m services.rollout`, handed over to each other by the coordinator's code
(benchmarks/shared_node.py). The weights are random, written once to a folder that the learner loads. A cycle is what
the hybrid schedule does in a Step: the engine sleeps at level 2 and the learner wakes ▶ TrainStep ▶ its optimizer
sleeps, the engine's weights come back empty and are published ▶ the learner sleeps, the engine generates. Before the
cycles: level 1 (weights kept in host memory) and the learner's tags apart. After them: an old token, a Wake without
room, a rank killed on its way to waking. Without a GPU the same runs over gloo and shows states, not memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from antiphon.tenant.v1 import tenant_pb2

from benchmarks import results
from benchmarks.one_rank_learner import SHAPES, write_model
from benchmarks.random_model import random_model
from benchmarks.shared_node import (
    ENGINE_ID,
    KV,
    LEARNER_ID,
    ON_CPU,
    OPTIMIZER,
    WEIGHTS,
    Move,
    SharedNode,
    Sizes,
    started,
    training_rows,
)
from services.common.config import ModelConfig
from services.common.errors import AntiphonError, Expired
from services.common.grants import Tag, tag_name
from services.coordinator.publication import Published
from services.learner.config import LearnerConfig
from services.rollout.config import RolloutConfig
from services.rollout.gpus import Gpu, engine_gpus
from services.rollout.vllm_start import weight_bytes_of

GIB = 2**30
WRITE_SECONDS = 120.0
UP_SECONDS = 150.0
FAILURES_SECONDS = 45.0  # of the limit, kept for what comes after the cycles
LATE_SECONDS = 60.0  # beyond the limit nothing goes on
SLOW_CYCLE_SECONDS = 2.5
SETTLED = 3  # cycles after which memory should not move any more
FLAT_SHARE = 0.01
FLAT_BYTES = 8 << 20  # also of a small process: it remembers answers, a bounded number
RESERVED_BYTES = 16 * GIB  # of the GPU, for what is under no tag: contexts, activations, workspaces, transfer buffers
# Times the weights of a bfloat16 learner: slices and whole weights; masters, two moments and gradients in float32.
LEARNER_WEIGHTS, LEARNER_OPTIMIZER = 2, 8
TRAVELLING_OPTIMIZER = 6  # of which masters and moments are kept
ROOM = 1.1  # of what is computed, for blocks that are larger than what is in them
SAMPLES, TOKENS = 16, 32
ROWS, ROW_TOKENS = 4, 256
PROMPT = tuple(range(100, 164))
GREEDY_TOKENS = 32
NO_ROOM_SECONDS = 5.0
TARGET_ASLEEP_SECONDS, TARGET_BACK_GB_PER_SECOND = 0.1, 45.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Hand-overs between a learner and an engine on one GPU, measured.")
    parser.add_argument("--shape", choices=[*SHAPES], default="3b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on CPU")
    parser.add_argument("--kv-gib", type=float, default=20.0)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--train-every", type=int, default=0, help="cycles; 0: each, or each 10th where that is slow")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: a minute more until the engine is up")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="of all; then what there is is written")
    parser.add_argument("--folder", type=Path, help="for the model and the logs; default: a temporary one")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "handoff.json")
    arguments = parser.parse_args()
    gpus = engine_gpus()
    arguments.dtype = arguments.dtype or ("bfloat16" if gpus else "float32")
    chosen = {name: value for name, value in vars(arguments).items() if name not in ("out", "folder")}
    result = results.begin(
        "handoff",
        {
            **chosen,
            "weights": "random, by seed; published " + ("by CUDA IPC" if gpus else "over gloo: no GPU, states only"),
            "generated_in_each_cycle": [SAMPLES, TOKENS],
            "trained_in_a_step": [ROWS, ROW_TOKENS],
            "seconds": "of a Sleep or Wake: by the worker, measuring of memory and digests of weights included; "
            "_call_: by the caller, with the word on the log; hand_over: all of one; protocol: what is left of it "
            "without the calls to tenants",
        },
    )
    folder = Path(tempfile.mkdtemp()) if arguments.folder is None else arguments.folder
    try:
        asyncio.run(_measure(arguments, folder, result, gpus))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        results.write(result, arguments.out)  # what was measured is kept, whatever becomes of its summary
        _summarise(result)
        print(json.dumps(result.summary, indent=1))
        print(f"written to {results.write(result, arguments.out)}")


async def _measure(arguments: argparse.Namespace, folder: Path, result: results.Result, gpus: Sequence[Gpu]) -> None:
    begin = time.monotonic()
    async with asyncio.timeout(arguments.limit_seconds + LATE_SECONDS):
        path = folder / "model"
        await asyncio.to_thread(_written, path, arguments.shape, arguments.dtype, bool(gpus))
        weight_bytes = weight_bytes_of(path, arguments.dtype)
        parameters = weight_bytes // {"float32": 4, "bfloat16": 2}[arguments.dtype]
        result.parameters |= {"parameters": parameters, "weight_bytes": weight_bytes}
        _say(begin, f"the model of {parameters / 1e9:.2f} billion parameters is written")
        sizes = model_sizes(gpus, weight_bytes, arguments.kv_gib) if gpus else ON_CPU
        learner = LearnerConfig.model_validate(
            {"micro_batch_tokens": 2048, "optimizer": {"learning_rate": 1e-6}, "failed_linger_seconds": 1.0}
        )
        kv_gib = arguments.kv_gib if gpus else 0.02
        engine = RolloutConfig.model_validate(
            {"max_sequence_tokens": 1024, "kv_cache_gib": kv_gib, "eager": not arguments.graphs, "prefix_cache": False}
        )
        model = ModelConfig(path=str(path), dtype=arguments.dtype)
        async with started(folder / "run", model, learner, engine, sizes) as node:
            measured = _Measurement(node, result, SHAPES[arguments.shape]["vocab_size"], begin)
            await measured.load()
            await measured.level_1(2)
            await measured.apart(3)
            await measured.idle(5)
            end = begin + arguments.limit_seconds - FAILURES_SECONDS
            await measured.cycles(arguments.cycles, arguments.train_every, end)
            await measured.an_old_token()
            if gpus:
                await measured.no_room()
            await measured.a_killed_rank()
            _say(begin, "done")


def _written(path: Path, shape: str, dtype: str, on_gpu: bool) -> None:
    """Writes a model with random weights, in a process that leaves nothing on the GPU."""
    process = multiprocessing.get_context("spawn").Process(target=write_random_model, args=(path, shape, dtype, on_gpu))
    process.start()
    process.join(WRITE_SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the model was not written within {WRITE_SECONDS:.0f} s: exit code {process.exitcode}")


def write_random_model(path: Path, shape: str, dtype: str, on_gpu: bool) -> None:
    """A folder that learner and engine start from."""
    import torch

    write_model(path, shape, dtype)
    device = torch.device("cuda" if on_gpu else "cpu")
    random_model(str(path), dtype, device, seed=0).save_pretrained(path)


def model_sizes(gpus: Sequence[Gpu], weight_bytes: int, kv_gib: float) -> Sizes:
    """What is granted of the first GPU for a bfloat16 model: somewhat more than each tag takes there."""
    gpu = gpus[0]
    learner = {WEIGHTS: LEARNER_WEIGHTS * weight_bytes, OPTIMIZER: LEARNER_OPTIMIZER * weight_bytes}
    engine = {WEIGHTS: weight_bytes, KV: kv_gib * GIB}
    return Sizes(
        learner={tag: {gpu.uuid: int(size * ROOM) + GIB // 2} for tag, size in learner.items()},
        engine={tag: {gpu.uuid: int(size * ROOM) + GIB // 2} for tag, size in engine.items()},
        capacity={gpu.uuid: gpu.total_bytes - RESERVED_BYTES},
    )


class _Measurement:
    """Drives the node and writes down what it sees."""

    def __init__(self, node: SharedNode, result: results.Result, vocabulary: int, begin: float) -> None:
        self._node = node
        self._samples = result.samples
        self._vocabulary = vocabulary
        self._begin = begin
        self._version = 0
        self._answer: tuple[list[int], int] | None = None
        """Greedy tokens and the version they are of."""

    async def load(self) -> None:
        node = self._node
        times: dict[str, Any] = {}
        starts = (
            (LEARNER_ID, partial(node.give, learner=(WEIGHTS, OPTIMIZER), seconds=UP_SECONDS)),
            (ENGINE_ID, partial(node.give, engine=(WEIGHTS, KV), seconds=UP_SECONDS)),
        )
        for name, start in starts:
            begin = time.monotonic()
            await start()
            times[f"{name}_up_seconds"] = time.monotonic() - begin
            times[f"{name}_held_bytes"] = await self._held()
            _say(self._begin, f"{name} is up after {times[f'{name}_up_seconds']:.1f} s")
        first = await self._refilled("first_")
        await node.give(engine=[WEIGHTS, KV])
        await self._generate(first)
        await self._greedy(first)
        self._samples["start"] = [times | first]

    async def level_1(self, times: int) -> None:
        """The engine keeps its weights; the first time pins the memory for that, as the first TrainStep makes the
        moments."""
        for number in range(1 + times):
            cycle: dict[str, Any] = {"first": number == 0}
            await self._train_phase(cycle, (WEIGHTS, OPTIMIZER), discard=False)
            if number == 0:
                await self._step(cycle, seed=0)
                # What was sampled before is still served: the engine has not seen the Step.
                cycle["learner_held_bytes"] = (await self._held())[LEARNER_ID]
            await self._hand_over(cycle, "to_engine", engine=[WEIGHTS, KV])
            _require(
                (await self._node.engine.state()).state == tenant_pb2.WORKER_STATE_READY,
                "an engine that kept its weights is READY after its Wake",
            )
            await self._generate(cycle)
            await self._greedy(cycle)
            self._samples.setdefault("level_1", []).append(cycle)
        await self._train_phase({}, (WEIGHTS,), discard=True)
        await self._refilled("")
        await self._node.give(engine=[WEIGHTS, KV])
        _say(self._begin, "level 1 is done")

    async def apart(self, times: int) -> None:
        """The learner's tags one by one; the engine sleeps meanwhile."""
        for _ in range(times):
            cycle: dict[str, Any] = {}
            await self._hand_over(cycle, "wake_weights", learner=[WEIGHTS], discard=True)
            await self._hand_over(cycle, "wake_optimizer", learner=[WEIGHTS, OPTIMIZER])
            await self._hand_over(cycle, "sleep_optimizer", learner=[WEIGHTS])
            cycle |= await self._refilled("publish_")
            await self._hand_over(cycle, "sleep_weights", engine=[WEIGHTS, KV])
            self._samples.setdefault("apart", []).append(cycle)
        _say(self._begin, "the learner's tags apart are done")

    async def idle(self, times: int) -> None:
        """Hand-overs in which nobody moves anything: a grant, and what is said about it."""
        for _ in range(times):
            await self._node.give(engine=[WEIGHTS, KV])
            self._samples.setdefault("idle_hand_over_seconds", []).append(self._node.hand_over_seconds)

    async def cycles(self, count: int, train_every: int, end: float) -> None:
        every = train_every or 1
        cycles = self._samples["cycles"] = []
        for number in range(count):
            if time.monotonic() > end:
                self._samples["stopped"] = [f"only {number} of {count} cycles fitted into the limit"]
                _say(self._begin, self._samples["stopped"][0])
                break
            begin = time.monotonic()
            moves_all = number % every == 0
            cycle: dict[str, Any] = {"number": number, "optimizer_woke": moves_all}
            await self._train_phase(cycle, (WEIGHTS, OPTIMIZER) if moves_all else (WEIGHTS,), discard=True)
            cycle["used_bytes_engine_asleep"] = await self._used()
            if moves_all and number % 10 != 5:  # now and then the same version is published again
                await self._step(cycle, seed=number)
            cycle |= await self._refilled("publish_")
            await self._hand_over(cycle, "to_engine", engine=[WEIGHTS, KV])
            await self._generate(cycle)
            await self._greedy(cycle)
            cycle["seconds"] = time.monotonic() - begin
            cycle["used_bytes_engine_awake"] = await self._used()
            cycle["rss_bytes"] = await self._rss()
            cycles.append(cycle)
            if number + 1 == SETTLED and not train_every:
                mean = statistics.mean(cycle["seconds"] for cycle in cycles[1:])
                every = 10 if mean > SLOW_CYCLE_SECONDS else 1
                _say(self._begin, f"a cycle takes {mean:.2f} s: trained in each {every if every > 1 else ''}")
            if number % 10 == 0:
                _say(self._begin, f"cycle {number}: {_short(cycle)}")

    # Failures

    async def an_old_token(self) -> None:
        before = await self._node.standing()
        outcomes = await self._node.refusals()
        wrong = {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("Conflict: ")}
        _require(not wrong, f"an old token is a Conflict everywhere: {wrong}")
        _require(await self._node.standing() == before, "a refused call touches nothing")
        self._note("stale_token", calls=sorted(outcomes), example=next(iter(outcomes.values())))

    async def no_room(self) -> None:
        """Somebody else fills the GPU: the learner's Wake, then the engine's, are refused and take nothing."""
        node = self._node
        await self._greedy({})
        need = {
            worker_id: sum(size for gpus in memory.values() for size in gpus.values())
            for worker_id, memory in ((LEARNER_ID, node.sizes.learner), (ENGINE_ID, node.sizes.engine))
        }
        engine_bytes = sum((await self._held())[ENGINE_ID].values())
        with _Ballast() as ballast:
            ballast.fill(leave=4 * GIB)
            _require(4 * GIB + engine_bytes < need[LEARNER_ID], "what the engine leaves is too little for the learner")
            await self._refused("learner", lambda: node.give(learner=[WEIGHTS, OPTIMIZER], seconds=NO_ROOM_SECONDS))
            ballast.fill(leave=4 * GIB)
            await self._refused("engine", lambda: node.give(engine=[WEIGHTS, KV], seconds=NO_ROOM_SECONDS))
        cycle: dict[str, Any] = {}
        await self._hand_over(cycle, "engine_once_there_is_room", engine=[WEIGHTS, KV])
        await self._greedy(cycle)
        await self._train_phase(cycle, (WEIGHTS, OPTIMIZER), discard=False)
        await self._hand_over(cycle, "to_engine", engine=[WEIGHTS, KV])
        await self._greedy(cycle)
        self._note("no_room_then_room", **cycle)

    async def _refused(self, who: str, hand_over: Callable[[], Any]) -> None:
        begin = time.monotonic()
        try:
            await hand_over()
        except Expired as error:
            text = str(error)
        else:
            raise RuntimeError(f"the {who} woke although there was no room for it")
        _require("are wanted" in text or "are missing" in text, f"the error has numbers: {text}")
        state = await (self._node.learner if who == "learner" else self._node.engine).state()
        _require(state.state == tenant_pb2.WORKER_STATE_ASLEEP, f"the {who} sleeps on, whole")
        _require(not any(part.bytes for device in state.devices for part in device.held), f"the {who} took nothing")
        self._note(f"no_room_for_{who}", seconds=time.monotonic() - begin, deadline_seconds=NO_ROOM_SECONDS, error=text)

    async def a_killed_rank(self) -> None:
        """On its way to waking; the engine, which kept its weights, serves on."""
        node = self._node
        await self._greedy({})
        rank = await node.learner_rank()
        os.kill(rank, signal.SIGSTOP)  # so that it dies with the Wake in its hands
        handing_over = asyncio.create_task(node.give(learner=[WEIGHTS, OPTIMIZER], seconds=30.0))
        await node.until_held_by(LEARNER_ID)
        begin = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        try:
            await handing_over
        except AntiphonError as error:
            text = f"{type(error).__name__}: {error}"
        else:
            raise RuntimeError("the learner woke although its rank was killed")
        _require(f"rank 0 (pid {rank}) was killed" in text, f"the error names the rank: {text}")
        cycle: dict[str, Any] = {"seconds": time.monotonic() - begin, "deadline_seconds": 30.0, "error": text}
        await node.ended(LEARNER_ID)
        await node.give(engine=[WEIGHTS, KV])
        await self._greedy(cycle)
        self._note("rank_killed", **cycle)

    # The steps

    async def _train_phase(self, cycle: dict[str, Any], tags: Sequence[Tag], *, discard: bool) -> None:
        await self._hand_over(cycle, "to_learner", learner=tags, discard=discard)

    async def _step(self, cycle: dict[str, Any], seed: int) -> None:
        rows = training_rows(ROWS, ROW_TOKENS, self._vocabulary, seed=seed)
        begin = time.monotonic()
        result = await self._node.train(rows)
        cycle["step_seconds"] = time.monotonic() - begin
        cycle["loss"] = result.updates[0].loss
        self._version = result.policy.version

    async def _refilled(self, prefix: str) -> dict[str, Any]:
        node = self._node
        cycle: dict[str, Any] = {}
        await self._hand_over(cycle, "to_both", learner=[WEIGHTS], engine=[WEIGHTS], asleep=[KV], discard=True)
        # It is awake already: what its Wake sees on the GPU is the engine's doing.
        cycle = {name: value for name, value in cycle.items() if not name.startswith("to_both_learner_wake")}
        begin = time.monotonic()
        published = await node.publish(self._version)
        return cycle | _of_publication(prefix, published, time.monotonic() - begin)

    async def _hand_over(self, cycle: dict[str, Any], name: str, **words: Any) -> None:
        await self._node.give(**words)
        moves = self._node.moves
        cycle[f"{name}_hand_over_seconds"] = whole = self._node.hand_over_seconds
        kinds = [[m.call_seconds for m in moves if m.kind == kind] for kind in ("sleep", "wake")]
        cycle[f"{name}_protocol_seconds"] = whole - sum(max(seconds, default=0.0) for seconds in kinds)
        for move in moves:
            cycle |= _of_move(name, move)

    async def _generate(self, cycle: dict[str, Any]) -> None:
        begin = time.monotonic()
        sampled = await self._node.generate(PROMPT, samples=SAMPLES, max_tokens=TOKENS)
        cycle["generate_seconds"] = time.monotonic() - begin
        lengths = [len(trajectory.token_ids) - len(PROMPT) for trajectory in sampled]
        _require(lengths == [TOKENS] * SAMPLES, f"{SAMPLES} answers of {TOKENS} tokens were asked for, got {lengths}")

    async def _greedy(self, cycle: dict[str, Any]) -> None:
        """The likeliest answer; under the version of the last one it must be the same."""
        answer = await self._node.greedy(PROMPT, GREEDY_TOKENS)
        before, self._answer = self._answer, answer
        if before is None or before[1] != answer[1]:
            return
        cycle["same_version_same_tokens"] = before == answer
        _require(before == answer, f"version {answer[1]} answered {before[0]}, then {answer[0]}")

    async def _used(self) -> int:
        """Of the GPU by all its processes, by the driver."""
        return sum(d.total_bytes - d.free_bytes for d in (await self._node.engine.state()).devices)

    async def _held(self) -> dict[str, dict[str, int]]:
        """Of each that is up, by tag."""
        found = {}
        for client in self._node.workers.tenants():
            try:
                state = await client.state()
            except AntiphonError:  # it waits for its grant
                continue
            found[client.worker_id] = {str(part.tag): part.bytes for device in state.devices for part in device.held}
        return found

    async def _rss(self) -> dict[str, int]:
        """Resident bytes of each process: "worker/first" is the service itself."""
        found = {}
        for name, pids in (await self._node.processes()).items():
            for number, pid in enumerate(pids):
                found[f"{name}/{number}"] = int(psutil.Process(pid).memory_info().rss)
        return found

    def _note(self, name: str, **what: Any) -> None:
        self._samples.setdefault("failures", []).append({"what": name, **what})
        _say(self._begin, f"{name}: {json.dumps(what)[:700]}")


class _Ballast:
    """What is free of the GPU, in this process's hands."""

    def __enter__(self) -> _Ballast:
        self._held: list[Any] = []
        return self

    def fill(self, leave: int) -> None:
        import torch

        free = torch.cuda.mem_get_info(0)[0]
        if free > leave:
            self._held.append(torch.empty(free - leave, dtype=torch.uint8, device="cuda:0"))
            torch.cuda.synchronize()

    def __exit__(self, *_: object) -> None:
        import torch

        self._held.clear()
        torch.cuda.empty_cache()


def _of_move(name: str, move: Move) -> dict[str, Any]:
    """One that moved nothing, as of a tenant that was awake, is left out."""
    tags = "_".join(sorted(tag_name(tag).lower() for tag in move.tags))
    what = f"{name}_{_WORKERS[move.worker_id]}_{move.kind}_{tags}"
    told = {f"{what}_seconds": move.seconds, f"{what}_call_seconds": move.call_seconds}
    if move.devices:
        told[f"{what}_bytes"] = move.bytes
    return told


_WORKERS = {LEARNER_ID: "learner", ENGINE_ID: "engine"}


def _of_publication(prefix: str, published: Published, total_seconds: float) -> dict[str, Any]:
    return {
        f"{prefix}total_seconds": total_seconds,
        f"{prefix}transfer_seconds": published.transfer_seconds,
        f"{prefix}pause_seconds": published.pause_seconds,
        f"{prefix}probe_seconds": published.probe_seconds,
        f"{prefix}load_seconds": published.load_seconds,
        f"{prefix}bytes": published.bytes,
        f"{prefix}extra_bytes": published.extra_bytes,
        f"{prefix}probe_difference": published.probe_difference,
    }


def _summarise(result: results.Result) -> None:
    """What follows from the samples that there are; a run that broke off has some of them."""
    samples, summary = result.samples, result.summary
    weight_bytes = int(result.parameters.get("weight_bytes", 0))
    summary["cycles"] = len(samples.get("cycles", []))
    travelling = {"weights": weight_bytes, "optimizer": TRAVELLING_OPTIMIZER * weight_bytes}
    travelling["optimizer_weights"] = sum(travelling.values())
    for group in ("cycles", "apart", "level_1"):
        # The first of each group pins memory or makes moments.
        rows = samples.get(group, [])[1:]
        for name in sorted({name for row in rows for name in row if name.endswith("seconds")}):
            values = [row[name] for row in rows if name in row]
            told: dict[str, Any] = {"median": statistics.median(values), "highest": max(values), "count": len(values)}
            size = _bytes_of(name, rows, travelling)
            if size and told["median"] > 0:
                told["gb_per_second"] = size / told["median"] / 1e9
            summary[f"{group}/{name}"] = told
    if idle := samples.get("idle_hand_over_seconds"):
        summary["idle_hand_over_seconds"] = {"median": statistics.median(idle), "highest": max(idle)}
    settled = samples.get("cycles", [])[SETTLED:]
    if len(settled) > 1:
        series = {"gpu, engine awake": [row["used_bytes_engine_awake"] for row in settled]}
        for all_of_it, name in ((True, "all of the learner"), (False, "the learner's weights")):
            rows = [row for row in settled if row["optimizer_woke"] is all_of_it]
            series[f"gpu, {name} awake"] = [row["used_bytes_engine_asleep"] for row in rows]
        for process in settled[-1]["rss_bytes"]:
            series[f"rss {process}"] = [row["rss_bytes"].get(process, 0) for row in settled]
        # On CPU nothing is used of a GPU.
        summary["memory"] = {name: _flatness(values) for name, values in series.items() if any(values)}
    same = [row["same_version_same_tokens"] for row in _rows(samples) if "same_version_same_tokens" in row]
    summary["same_version_same_tokens"] = {"compared": len(same), "same": sum(same)}
    _targets(summary)


def _bytes_of(name: str, rows: Iterable[dict[str, Any]], travelling: dict[str, int]) -> float:
    """What a duration is set against: for the learner what travels, for the engine what the driver saw."""
    stem = name.removesuffix("_seconds").removesuffix("_call")
    if name.endswith("publish_transfer_seconds") or name.endswith("publish_pause_seconds"):
        return float(travelling["weights"])
    sizes = [row[f"{stem}_bytes"] for row in rows if row.get(f"{stem}_bytes")]
    if not sizes:
        return 0.0
    if "_learner_sleep_" in stem or "_learner_wake_" in stem:
        if stem.startswith("wake_optimizer_"):  # it names the weights too, which are awake
            return float(travelling["optimizer"])
        return float(travelling[stem.partition("_sleep_")[2] or stem.partition("_wake_")[2]])
    return float(statistics.median(sizes))


def _flatness(values: Sequence[float]) -> dict[str, Any]:
    """What a line fitted to the values rises by over all of them, and their range."""
    middle = statistics.median(values)
    drift = 0.0
    if len(values) > 1:
        drift = statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)
    spread = max(values) - min(values)
    allowed = max(FLAT_SHARE * middle, FLAT_BYTES)
    return {
        "median_bytes": middle,
        "drift_bytes": drift,
        "range_bytes": spread,
        "drift_share": drift / middle,
        "range_share": spread / middle,
        "flat": abs(drift) <= allowed and spread <= allowed,
    }


def _targets(summary: dict[str, Any]) -> None:
    asleep = summary.get("cycles/to_learner_engine_sleep_kv_weights_seconds", {})
    if "gb_per_second" in asleep:
        summary["engine_asleep_within_target"] = asleep["median"] <= TARGET_ASLEEP_SECONDS
    back = summary.get("cycles/to_learner_learner_wake_optimizer_weights_seconds", {})
    if "gb_per_second" in back:
        summary["learner_back_within_target"] = back["gb_per_second"] >= TARGET_BACK_GB_PER_SECOND
    if memory := summary.get("memory"):
        summary["memory_flat"] = all(part["flat"] for part in memory.values())


def _rows(samples: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [row for rows in samples.values() for row in rows if isinstance(row, dict)]


def _short(cycle: dict[str, Any]) -> str:
    wanted = ("hand_over_seconds", "publish_pause_seconds", "step_seconds", "generate_seconds")
    parts = {name: round(value, 3) for name, value in cycle.items() if name.endswith(wanted)}
    return f"{cycle['seconds']:.2f} s in all, {json.dumps(parts)}"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"it does not hold: {what}")


def _say(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:7.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
