"""What a Step costs beside sampling, scoring and training: the real coordinator among services that answer at once.

`python -m services.coordinator` in a process of its own, with a NATS server; the simulated services of the tests in one
other process, each rollout worker behind a gRPC server of its own.

Either nothing they do takes time by intent, and the whole Step is overhead; or sampling and training last as long as
they are told, and overhead is what the Step takes beyond: work that sampling hides is none then. The time that the
simulation itself takes, on the same cores, is in both, and makes them upper bounds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import trajectory_pb2

from services.cli.launch import nats_server
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, dump, parse
from services.common.processes import die_with_parent, spawn
from services.coordinator.config import CoordinatorConfig
from tests.simulated.services import simulated_services, write_model_folder

DATASET = "train"
MAX_SEQUENCE_TOKENS = 4096
UP_SECONDS = 120.0
STEP_SECONDS = 60.0
WATCH_SECONDS = 0.05
LETTERS = "abcdef0123456789"


@dataclass(frozen=True)
class Shape:
    """The fixed batch."""

    prompts: int
    samples: int
    tokens: int
    """Sampled, of each trajectory."""
    sampling_seconds: float = 0.0
    """From a Step's first call until its last trajectory is sampled."""
    training_seconds: float = 0.0

    @property
    def work_seconds(self) -> float:
        return self.sampling_seconds + self.training_seconds


@dataclass(frozen=True)
class Run:
    """One coordinator's Steps, those that warm up left out."""

    workers: int
    steps: list[dict[str, float]]
    """Lines of metrics.jsonl."""
    coordinator_cpu_seconds: float
    """A Step's, on average, all threads."""
    simulation_cpu_seconds: float

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps)


async def measure(folder: Path, shape: Shape, *, workers: int, steps: int, warm_up: int, seed: int) -> Run:
    """Runs that many Steps after `warm_up` more."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    async with _nats(folder) as (url, monitor_url), _simulation(url, workers, shape) as simulation:
        path = folder / "coordinator.yaml"
        path.write_text(
            dump(
                process_config(
                    folder, shape, nats=(url, monitor_url), workers=workers, steps=steps + warm_up, seed=seed
                )
            )
        )
        log = folder / "coordinator.log"
        command = [sys.executable, "-m", "services.coordinator", "--config", str(path)]
        process = await spawn(command, environment=dict(os.environ), log=log)
        try:
            return await _watch(process, folder, simulation, workers=workers, steps=steps, warm_up=warm_up)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def process_config(
    folder: Path, shape: Shape, *, nats: tuple[str, str], workers: int, steps: int, seed: int
) -> ProcessConfig[CoordinatorConfig]:
    """`nats` is its two URLs: for clients, and of its monitor."""
    rows = [{"prompt": f"what is {n}?", "reference": str(n)} for n in range(shape.prompts * 4)]
    data = folder / "training.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "steps": steps,
        "data": {"path": str(data), "name": DATASET},
        "sampling": {"max_tokens": shape.tokens},
        "prompts_per_step": shape.prompts,
        "samples_per_prompt": shape.samples,
        "scorer": "digits",
        "rollout_workers": workers,
        "warm_up": False,
        "export": False,
        "start_seconds": UP_SECONDS,
    }
    service = ServiceConfig(
        run_id="benchmark",
        worker_id="coordinator-0",
        run_dir=folder / "run",
        nats_url=nats[0],
        nats_monitor_url=nats[1],
        seed=seed,
        log_level="WARNING",
    )
    model = ModelConfig(path=str(write_model_folder(folder / "model")), dtype="float32")
    settings = parse(CoordinatorConfig, tree, "the benchmark")
    return ProcessConfig[CoordinatorConfig](service=service, model=model, settings=settings)


@asynccontextmanager
async def _nats(folder: Path) -> AsyncIterator[tuple[str, str]]:
    own = folder / "nats"
    own.mkdir()
    command = [nats_server.find_binary(), "-c", str(nats_server.write_config(own))]
    process = await spawn(command, environment=dict(os.environ), log=folder / "nats.log")
    try:
        yield await nats_server.wait_until_listening(own, process, folder / "nats.log")
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _simulation(nats_url: str, workers: int, shape: Shape) -> AsyncIterator[psutil.Process]:
    """All services but the coordinator, up and announced, in one process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_simulate, args=(theirs, os.getpid(), nats_url, workers, shape))
    process.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, UP_SECONDS):
            raise RuntimeError(f"{workers} simulated rollout workers are not up after {UP_SECONDS:.0f} s")
        ours.recv()
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        await asyncio.to_thread(process.join, 10)


def _simulate(pipe: Connection, parent: int, nats_url: str, workers: int, shape: Shape) -> None:
    die_with_parent(parent)
    asyncio.run(_serve(pipe, nats_url, workers, shape))


async def _serve(pipe: Connection, nats_url: str, workers: int, shape: Shape) -> None:
    async with simulated_services(nats_url, "benchmark", rollouts=workers) as simulation:
        for engine in simulation.rollouts:
            engine.max_sequence_tokens = MAX_SEQUENCE_TOKENS
            engine.change_trajectory = lengthen(engine.alphabet, shape.tokens)
            engine.sample_seconds = spread(shape.sampling_seconds)
        simulation.learner.train_delay_seconds = shape.training_seconds
        simulation.learner.max_sequence_tokens = MAX_SEQUENCE_TOKENS
        pipe.send("up")
        await asyncio.Event().wait()


def lengthen(alphabet: list[int], tokens: int) -> Callable[[trajectory_pb2.Trajectory], None]:
    """Makes the short answer of a simulated engine one of `tokens` tokens; answers of the self-check stay as they are,
    since the learner is asked for their log-probabilities."""
    draw = random.Random(0)
    ids = [draw.choice(alphabet) for _ in range(tokens)]
    logprobs = [-0.5 - 2.0 * draw.random() for _ in range(tokens)]

    def change(trajectory: trajectory_pb2.Trajectory) -> None:
        if trajectory.prompt_id.dataset != DATASET:
            return
        prompt = list(trajectory.loss_mask).index(True)
        for field, values in (
            (trajectory.token_ids, ids),
            (trajectory.loss_mask, [True] * tokens),
            (trajectory.behavior_logprobs, logprobs),
        ):
            # The first sampled token stays, so that answers and scores differ.
            kept = prompt + 1
            del field[kept:]
            field.extend(values[1:])  # type: ignore[arg-type]
        trajectory.version_spans[0].end = prompt + tokens
        trajectory.finish_reason = trajectory_pb2.FINISH_REASON_LENGTH

    return change


def spread(seconds: float) -> Callable[[rollout_pb2.GenerateRequest, int], float]:
    """When each trajectory is sampled: between a fifth and the whole of the time, and at its end those that are sample
    0 of every fourth row, so that no Step is done before. Those of the self-check at once."""

    def sample_seconds(request: rollout_pb2.GenerateRequest, number: int) -> float:
        prompt = request.prompt_id
        if prompt.dataset != DATASET:
            return 0.0
        if number == 0 and prompt.row % 4 == 0:
            return seconds
        return seconds * random.Random(f"{prompt.epoch}/{prompt.row}/{number}").uniform(0.2, 1.0)

    return sample_seconds


async def _watch(
    process: asyncio.subprocess.Process,
    folder: Path,
    simulation: psutil.Process,
    *,
    workers: int,
    steps: int,
    warm_up: int,
) -> Run:
    metrics, log = folder / "run" / "metrics.jsonl", folder / "coordinator.log"
    coordinator = psutil.Process(process.pid)
    begin: tuple[float, float] | None = None
    lines: list[dict[str, Any]] = []
    end = time.monotonic() + UP_SECONDS + STEP_SECONDS * (steps + warm_up)
    while len(lines) < steps + warm_up:
        if process.returncode is not None or time.monotonic() > end:
            tail = (await asyncio.to_thread(log.read_text, errors="replace"))[-3000:]
            raise RuntimeError(f"the coordinator made {len(lines)} of {steps + warm_up} Steps with {workers}:\n{tail}")
        await asyncio.sleep(WATCH_SECONDS)
        lines = await asyncio.to_thread(_lines, metrics)
        if begin is None and len(lines) >= warm_up:
            begin, first = (_cpu_seconds(coordinator), _cpu_seconds(simulation)), len(lines)
    if begin is None or len(lines) == first:
        raise RuntimeError(
            f"{steps} Steps within {WATCH_SECONDS} s are too short to be watched: take more, or longer ones"
        )
    counted = len(lines) - first
    return Run(
        workers,
        lines[warm_up:],
        (_cpu_seconds(coordinator) - begin[0]) / counted,
        (_cpu_seconds(simulation) - begin[1]) / counted,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
