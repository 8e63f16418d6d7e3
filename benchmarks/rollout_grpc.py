"""What sampling through the service costs: tokens per second over gRPC against the same vLLM in process.

    python -m benchmarks.rollout_grpc [--shape 135m] [--requests 1024] [--tokens 256] [--rounds 4] [--out FILE]

Two engines are up during the whole run, one works at a time, turn about: (a) AsyncLLM, started by the service's own
code and asked directly in the process that holds it; (b) `python -m services.rollout` with a nats-server, asked by the
coordinator's client from another process. Both got the same random weights by the same publication, and sample the same
prompts with the same seeds, each trajectory exactly --tokens long, with the log-probability of each sampled token and
one answer at the end. Only ratios of neighbouring rounds are compared. Writes benchmarks/results/rollout-grpc.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1.trajectory_pb2 import PromptId

from benchmarks import results
from benchmarks.one_rank_learner import SHAPES, OneRankLearner, write_model
from benchmarks.rollout_processes import START_SECONDS, as_service, in_this_process, process_config
from services.common.client import new_request_id
from services.common.config import ModelConfig, ProcessConfig
from services.common.processes import die_with_parent
from services.coordinator.clients import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.gpus import engine_gpus
from services.rollout.seeds import sample_seed

RUN_SEED = 11
ROUND_SECONDS = 400.0
PROMPT_TOKENS = 64


def prompt_of(row: int, vocabulary: int) -> list[int]:
    """Another one for each row."""
    return [(row * 7919 + position * 104729 + 13) % vocabulary for position in range(PROMPT_TOKENS)]


class InProcess:
    """Side (a), in a process of its own as the service's is; it answers over a pipe."""

    def __init__(self, arguments: argparse.Namespace, process: ProcessConfig[RolloutConfig]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_in_process, args=(theirs, os.getpid(), arguments, process.model_dump()))
        self._process.start()
        theirs.close()

    async def answer(self, question: Any, seconds: float) -> Any:
        if question is not None:
            self._pipe.send(question)
        if not await asyncio.to_thread(self._pipe.poll, seconds):
            raise RuntimeError(f"the engine in process did not answer {question!r} within {seconds:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join(10)


def _in_process(pipe: Connection, parent: int, arguments: argparse.Namespace, process: dict[str, Any]) -> None:
    die_with_parent(parent)
    asyncio.run(_serve_in_process(pipe, arguments, ProcessConfig[RolloutConfig].model_validate(process)))


async def _serve_in_process(
    pipe: Connection, arguments: argparse.Namespace, process: ProcessConfig[RolloutConfig]
) -> None:
    """Says its address (for the publication), then runs one round for each round number that it is sent."""
    try:
        async with in_this_process(process) as (client, rollout):
            pipe.send(client._peer.address)
            while True:
                number, prompts = await asyncio.to_thread(pipe.recv)
                pipe.send(await _direct_round(rollout.engine._llm, arguments, number, prompts))  # type: ignore[attr-defined]
    except Exception as error:
        pipe.send(RuntimeError(repr(error)))
        raise


@dataclass(frozen=True)
class Round:
    """What one side did."""

    seconds: float
    cpu_seconds: float
    """Of the process that holds AsyncLLM, its engine core apart."""
    sampled: list[list[int]]
    """Ids in the order of rows and samples."""


async def _direct_round(llm: Any, arguments: argparse.Namespace, number: int, prompts: int) -> Round:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def one(row: int, sample: int) -> list[int]:
        parameters = SamplingParams(
            temperature=1.0,
            seed=sample_seed(RUN_SEED + number, PromptId(dataset="benchmark", row=row), sample, 0),
            max_tokens=arguments.tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(prompt_of(row, arguments.vocabulary), cache_salt=f"round {number}")
        last = None
        async for output in llm.generate(prompt, parameters, f"{number}/{row}/{sample}"):
            last = output
        (completion,) = last.outputs
        if len(completion.logprobs.logprobs) != len(completion.token_ids):
            raise RuntimeError("not one log-probability for each sampled token")
        return list(completion.token_ids)

    pairs = [(row, sample) for row in range(prompts) for sample in range(arguments.samples)]
    begin, cpu = time.monotonic(), time.process_time()
    async with asyncio.timeout(ROUND_SECONDS):
        sampled = await asyncio.gather(*(one(row, sample) for row, sample in pairs))
    return Round(time.monotonic() - begin, time.process_time() - cpu, sampled)


async def served_round(
    client: RolloutClient, service: psutil.Process, arguments: argparse.Namespace, number: int, prompts: int
) -> Round:
    """As `_direct_round`, by the coordinator's client: a call for each prompt."""

    async def one(row: int) -> dict[int, list[int]]:
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=PromptId(dataset="benchmark", row=row),
            prompt_token_ids=prompt_of(row, arguments.vocabulary),
            samples=arguments.samples,
            run_seed=RUN_SEED + number,
            sampling=rollout_pb2.Sampling(temperature=1.0, max_tokens=arguments.tokens),
            policy_version=0,
        )
        found: dict[int, list[int]] = {}
        async with aclosing(client.generate(request, ROUND_SECONDS)) as trajectories:
            async for trajectory in trajectories:
                if len(trajectory.behavior_logprobs) != len(trajectory.token_ids):
                    raise RuntimeError("not one log-probability for each token")
                found[trajectory.sample_number] = trajectory.token_ids[PROMPT_TOKENS:]
        return found

    def cpu_seconds() -> float:
        times = service.cpu_times()
        return float(times.user + times.system)

    begin, cpu = time.monotonic(), cpu_seconds()
    answers = await asyncio.gather(*(one(row) for row in range(prompts)))
    seconds, cpu = time.monotonic() - begin, cpu_seconds() - cpu
    return Round(seconds, cpu, [list(answer[sample]) for answer in answers for sample in range(arguments.samples)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling through the service against the same vLLM in process.")
    parser.add_argument("--shape", choices=[*SHAPES], default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on CPU")
    parser.add_argument("--requests", type=int, default=1024, help="trajectories of one round")
    parser.add_argument("--samples", type=int, default=8, help="of one prompt, which is one call")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=4, help="of each side, after one that warms up")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "rollout-grpc.json")
    arguments = parser.parse_args()
    on_gpu = bool(engine_gpus())
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    arguments.prompts = arguments.requests // arguments.samples
    arguments.vocabulary = SHAPES[arguments.shape]["vocab_size"]
    result = results.begin(
        arguments.out.stem,
        {
            **{name: value for name, value in vars(arguments).items() if name != "out"},
            "prompt_tokens": PROMPT_TOKENS,
            "run_seed": RUN_SEED,
            "weights": "random, by seed; published to both engines " + ("by CUDA IPC" if on_gpu else "over gloo"),
        },
    )
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(_measure(arguments, Path(name), result, on_gpu))
    print(f"{result.summary}\nwritten to {results.write(result, arguments.out)}")


async def _measure(arguments: argparse.Namespace, folder: Path, result: results.Result, on_gpu: bool) -> None:
    path = write_model(folder / "model", arguments.shape, arguments.dtype)
    model = ModelConfig(path=str(path), dtype=arguments.dtype)
    settings = RolloutConfig(
        max_sequence_tokens=PROMPT_TOKENS + arguments.tokens,
        max_running=arguments.max_running,
        kv_cache_gib=arguments.kv_gib,
        eager=arguments.eager,
    )
    learner = OneRankLearner(path, dtype=arguments.dtype, device="cuda" if on_gpu else "cpu", seed=0)
    direct = InProcess(arguments, process_config(model, settings, folder / "direct"))
    try:
        async with as_service(model, settings, folder / "served") as served:
            print("the service is up", flush=True)
            address = await direct.answer(None, START_SECONDS)  # it started at the same time
            print("the engine in process is up", flush=True)
            owner = RolloutClient("direct", "", address)
            for client in (owner, served):
                publication = await learner.publish(client, 0)
                print(f"published in {publication.total_seconds:.2f} s", flush=True)
            await owner.close()
            await _rounds(arguments, direct, served, result)
    finally:
        direct.close()


async def _rounds(
    arguments: argparse.Namespace, direct: InProcess, served: RolloutClient, result: results.Result
) -> None:
    service = psutil.Process((await served.state()).pids[0])
    rounds: dict[str, list[Round]] = {"in_process": [], "grpc": []}
    for number in range(arguments.rounds + 1):
        prompts = arguments.prompts if number else max(arguments.prompts // 4, 1)
        tokens = prompts * arguments.samples * arguments.tokens
        # Which side is first changes, so that a drift of the machine favours none.
        for side in ("in_process", "grpc") if number % 2 else ("grpc", "in_process"):
            if side == "in_process":
                done: Round = await direct.answer((number, prompts), ROUND_SECONDS + 10)
            else:
                done = await served_round(served, service, arguments, number, prompts)
            if any(len(ids) != arguments.tokens for ids in done.sampled):
                raise RuntimeError(f"{side}: not every trajectory has {arguments.tokens} tokens")
            if number:
                rounds[side].append(done)
            warm = "" if number else " (warm-up)"
            print(f"round {number}: {side} {tokens / done.seconds:,.0f} tokens/s{warm}", flush=True)
    pairs = list(zip(rounds["in_process"], rounds["grpc"], strict=True))
    ratios = [a.seconds / b.seconds for a, b in pairs]
    result.samples = {"ratio": ratios, "equal_trajectories_share": [_equal_share(a, b) for a, b in pairs]}
    for side, done_rounds in rounds.items():
        result.samples[f"{side}_tokens_per_second"] = [tokens / done.seconds for done in done_rounds]
        result.samples[f"{side}_front_cpu_seconds"] = [done.cpu_seconds for done in done_rounds]
    result.summary = {
        "tokens_of_a_round": tokens,
        "in_process_tokens_per_second": statistics.median(result.samples["in_process_tokens_per_second"]),
        "grpc_tokens_per_second": statistics.median(result.samples["grpc_tokens_per_second"]),
        "ratio_median": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "in_process_front_cpu_seconds": statistics.median(result.samples["in_process_front_cpu_seconds"]),
        "grpc_front_cpu_seconds": statistics.median(result.samples["grpc_front_cpu_seconds"]),
    }


def _equal_share(one: Round, other: Round) -> float:
    """Where the batches differ in composition, so may the last bits, and then the tokens."""
    return sum(a == b for a, b in zip(one.sampled, other.sampled, strict=True)) / len(one.sampled)


if __name__ == "__main__":
    main()
