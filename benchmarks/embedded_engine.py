"""How fast the embedded transformers engine samples on a CPU, each request alone or all in one batch.

    python -m benchmarks.embedded_engine [--shape 135m] [--requests 16] [--tokens 32] [--rounds 3] [--out FILE]

Two `python -m services.rollout` are up, one works at a time, turn about, asked as benchmarks/rollout_grpc.py asks vLLM:
its prompts, its seeds, the same random weights. Writes benchmarks/results/embedded-engine.json.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import psutil

from benchmarks import results
from benchmarks.one_rank_learner import SHAPES, OneRankLearner, write_model
from benchmarks.rollout_grpc import PROMPT_TOKENS, RUN_SEED, Round, served_round
from benchmarks.rollout_processes import as_service
from services.common.config import ModelConfig
from services.coordinator.clients import RolloutClient
from services.rollout.config import RolloutConfig

WAYS: tuple[Literal["alone", "continuous"], ...] = ("alone", "continuous")


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Round]]:
    """The rounds of each way, one that warms up left out."""
    path = write_model(folder / "model", arguments.shape, "float32")
    model = ModelConfig(path=str(path), dtype="float32")
    learner = OneRankLearner(path, dtype="float32", device="cpu", seed=0)
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as stack:
        clients: dict[str, RolloutClient] = {}
        for way in WAYS:
            settings = RolloutConfig(
                engine="transformers",
                batching=way,
                max_sequence_tokens=PROMPT_TOKENS + arguments.tokens,
                max_running=arguments.requests,
            )
            clients[way] = await stack.enter_async_context(as_service(model, settings, folder / way))
            await learner.publish(clients[way], 0)
            print(f"{way} is up", flush=True)
        services = {way: psutil.Process((await client.state()).pids[0]) for way, client in clients.items()}
        for number in range(arguments.rounds + 1):
            for way in WAYS:
                prompts = arguments.prompts if number else 1
                done = await served_round(clients[way], services[way], arguments, number, prompts)
                if number:
                    rounds[way].append(done)
                    print(f"round {number}: {way} {_rate(arguments, done):,.1f} tokens/s", flush=True)
    return rounds


def _rate(arguments: argparse.Namespace, done: Round) -> float:
    return len(done.sampled) * float(arguments.tokens) / done.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the embedded engine samples on a CPU.")
    parser.add_argument("--shape", choices=[*SHAPES], default="135m")
    parser.add_argument("--requests", type=int, default=16, help="trajectories of one round")
    parser.add_argument("--samples", type=int, default=8, help="of one prompt, which is one call")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="of each way, after one that warms up")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "embedded-engine.json")
    arguments = parser.parse_args()
    arguments.prompts = arguments.requests // arguments.samples
    arguments.vocabulary = SHAPES[arguments.shape]["vocab_size"]
    parameters = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = results.begin("embedded-engine", {**parameters, "prompt_tokens": PROMPT_TOKENS, "run_seed": RUN_SEED})
    with tempfile.TemporaryDirectory() as name:
        rounds = asyncio.run(measure(arguments, Path(name)))
    rates = {way: [_rate(arguments, done) for done in every] for way, every in rounds.items()}
    result.samples = {f"{way}_tokens_per_second": every for way, every in rates.items()}
    result.summary = {f"{way}_tokens_per_second": statistics.median(every) for way, every in rates.items()}
    result.summary["continuous_over_alone"] = statistics.median(
        b / a for a, b in zip(rates["alone"], rates["continuous"], strict=True)
    )
    print(f"{result.summary}\nwritten to {results.write(result, arguments.out)}")


if __name__ == "__main__":
    main()
