"""What a publication takes: transfer and pause apart, against vLLM's own senders, and what its failures cost.

    python -m benchmarks.publication [--parts nccl,ipc,greedy,tp2,failures] [--shape 7b] [--out FOLDER]

    nccl      one learner rank on GPU 0, engine on GPU 1; then the same weights by vLLM's packed sender and by one call
              per tensor
    ipc       learner and engine on one GPU
    greedy    a small model in float32 over NCCL, then over IPC: every greedy answer is the trainer's (in bfloat16, with
              random weights, near ties fall either way)
    tp2       two ZeRO-3 ranks and a TP-2 engine on the same two GPUs, in bfloat16 (timed) and float32 (greedy equal)
    failures  over NCCL: a refused push, a rank that raises, is killed, stands still; an engine killed in the middle

Real services with NATS between them, driven by the coordinator's own publication code; the learner's ranks hold random
weights in ZeRO-3 slices (benchmarks/random_rank.py). After each part the engine's greedy tokens are compared with those
of a plain transformers model of the same seed. Without GPUs all of it runs over gloo: `--shape tiny --parts nccl`.
One result file a part, benchmarks/results/publication-<part>.json, or -<part>-gloo.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.events.v1 import events_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.trajectory_pb2 import PromptId

from benchmarks import results
from benchmarks.one_rank_learner import SHAPES, write_model
from benchmarks.random_model import random_model
from benchmarks.random_rank import FAULT_FILE
from services.cli.launch import nats_server
from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import new_request_id
from services.common.config import Config, ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.errors import AntiphonError
from services.common.processes import spawn
from services.coordinator.clients import RolloutClient
from services.coordinator.config import PublicationConfig
from services.coordinator.publication import Publication
from services.coordinator.workers import LEARNER, ROLLOUT, Workers
from services.learner.config import LearnerConfig
from services.rollout.config import RolloutConfig
from services.rollout.gpus import engine_gpus

RUN_ID = "publication"
SEED = 1
START_SECONDS, CALL_SECONDS = 240.0, 60.0
STOCK_SECONDS = 120.0
PROMPTS, ANSWER_TOKENS = 8, 16
ORDERED_DEADLINE_SECONDS = 6.0  # of the publications that are made to fail


@dataclass(frozen=True)
class Setting:
    """Who is where."""

    shape: str
    dtype: str
    learner_gpus: str
    engine_gpus: str
    ranks: int = 1
    tensor_parallel: int = 1
    bucket_mib: int = 512
    kv_gib: float = 2.0
    transport: str = "auto"
    eager: bool = True
    """Without CUDA graphs the engine is up sooner; its probe takes longer."""


@dataclass
class Services:
    """The processes of one part, and what speaks to them."""

    folder: Path
    setting: Setting
    nats_url: str
    workers: Workers
    registry: Registry
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, kind: str, settings: Config, gpus: str) -> None:
        """Starts the learner or the engine; an older one of that kind must have ended."""
        path = self.folder / f"{kind}-{len(list(self.folder.glob(kind + '-*.yaml')))}.yaml"
        own = ServiceConfig(
            run_id=RUN_ID, worker_id=f"{kind}-0", run_dir=self.folder, nats_url=self.nats_url, seed=SEED
        )
        model = ModelConfig(path=str(self.folder / "model"), dtype=self.setting.dtype)  # type: ignore[arg-type]
        process: ProcessConfig[Any] = ProcessConfig(service=own, model=model, settings=settings)
        path.write_text(dump(process))
        module = {"learner": "benchmarks.random_learner", "rollout": "services.rollout"}[kind]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpus,
            "HF_HUB_OFFLINE": "1",
            FAULT_FILE: str(self.folder / "fault"),
        }
        command = [sys.executable, "-m", module, "--config", str(path)]
        self.processes[kind] = await spawn(command, environment=environment, log=self.folder / f"{kind}.log")

    async def start_learner(self) -> None:
        await self.start(
            "learner", LearnerConfig(ranks=self.setting.ranks, failed_linger_seconds=1.0), self.setting.learner_gpus
        )

    async def start_engine(self) -> None:
        settings = RolloutConfig(
            max_sequence_tokens=1024,
            kv_cache_gib=self.setting.kv_gib,
            tensor_parallel=self.setting.tensor_parallel,
            eager=self.setting.eager,
        )
        await self.start("rollout", settings, self.setting.engine_gpus)

    async def up(self) -> None:
        await self.workers.wait_until_up(START_SECONDS)

    async def end(self, kind: str) -> None:
        """Kills a service, its children go with it, and waits until nobody hears of it as one that is up."""
        process = self.processes.pop(kind)
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), CALL_SECONDS)
        wanted = events_pb2.WORKER_KIND_LEARNER if kind == "learner" else events_pb2.WORKER_KIND_ROLLOUT
        if not await self.registry.wait_for(lambda: not self.registry.alive(wanted), CALL_SECONDS):
            raise RuntimeError(f"{kind} is still announced")

    def fresh_workers(self) -> None:
        """Forgets who was there."""
        self.workers = Workers(self.registry, {LEARNER: 1, ROLLOUT: 1})


@asynccontextmanager
async def services(setting: Setting) -> AsyncIterator[Services]:
    """NATS, one learner and one engine, up; all gone afterwards. Their logs are printed when something raises."""
    with tempfile.TemporaryDirectory(prefix="antiphon-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_model(folder / "model", setting.shape, setting.dtype)
        (folder / "nats").mkdir()
        command = [nats_server.find_binary(), "-c", str(nats_server.write_config(folder / "nats"))]
        nats = await spawn(command, environment=dict(os.environ), log=folder / "nats.log")
        url, _ = await nats_server.wait_until_listening(folder / "nats", nats, folder / "nats.log")
        bus = await Bus.connect(url, "benchmark")
        registry = Registry(bus, RUN_ID)
        listening = asyncio.create_task(registry.run())
        own = Services(folder, setting, url, Workers(registry, {LEARNER: 1, ROLLOUT: 1}), registry, {"nats": nats})
        try:
            await own.start_learner()
            await own.start_engine()
            await own.up()
            yield own
        except BaseException:
            _print_logs(folder)
            raise
        finally:
            await own.workers.close()
            listening.cancel()
            await bus.close()
            for process in own.processes.values():
                if process.returncode is None:
                    process.kill()
                await process.wait()


def _print_logs(folder: Path) -> None:
    for log in sorted(folder.rglob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", flush=True)


async def measured(setting: Setting, pushes: int) -> tuple[list[dict[str, Any]], list[list[int]], dict[str, Any]]:
    """Each publication's numbers, the engine's greedy answers after the last, and facts of the set-up."""
    begin = time.monotonic()
    async with services(setting) as own:
        up = time.monotonic() - begin
        print(f"  services up after {up:.0f} s", flush=True)
        config = PublicationConfig(bucket_mib=setting.bucket_mib, transport=setting.transport)  # type: ignore[arg-type]
        publication = Publication(own.workers, config, setting.dtype)
        rows: list[dict[str, Any]] = []
        for number in range(pushes):
            before = time.monotonic()
            done = await publication.publish(0)
            row = {
                "call_seconds": time.monotonic() - before,
                "transfer_seconds": done.transfer_seconds,
                "load_seconds": done.load_seconds,
                "probe_seconds": done.probe_seconds,
                "pause_seconds": done.pause_seconds,
                "bytes": done.bytes,
                "extra_bytes": done.extra_bytes,
                "probe_difference": done.probe_difference,
                "joined": number == 0,
            }
            rows.append(row)
            print(
                "  " + json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True
            )
        (engine,) = own.workers.rollouts()
        answers = await greedy_of_engine(engine, setting.shape)
        states = [await own.workers.learner().state(), await engine.state()]
        facts = {"seconds_to_start": up, "backends": [state.backend for state in states]}
        return rows, answers, facts


async def greedy_of_engine(engine: RolloutClient, shape: str) -> list[list[int]]:
    async def one(number: int, prompt: list[int]) -> list[int]:
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=PromptId(dataset="greedy", row=number),
            prompt_token_ids=prompt,
            samples=1,
            sampling=rollout_pb2.Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS),
        )
        async with aclosing(engine.generate(request, CALL_SECONDS)) as stream:
            async for trajectory in stream:
                return list(trajectory.token_ids)[len(prompt) :]
        raise RuntimeError("no trajectory came")

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts(shape)))))


def prompts(shape: str) -> list[list[int]]:
    """Token ids far from the special ones."""
    vocabulary = SHAPES[shape]["vocab_size"]
    return [[100 + (37 * n + 11 * k) % (vocabulary - 100) for k in range(8 + n)] for n in range(PROMPTS)]


def compare_greedy(setting: Setting, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The engine's tokens against a plain model of the same seed: how many answers are equal, and where one is not, how
    far the plain model's own choice was ahead, in nats: in bfloat16 near ties fall either way.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(str(write_model(Path(folder), setting.shape, setting.dtype)), setting.dtype, device, SEED)
    gaps: list[float] = []
    equal = 0
    for prompt, answer in zip(prompts(setting.shape), answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=device)
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        behind = logprobs.max(dim=-1).values - logprobs.gather(1, torch.tensor([*answer], device=device)[:, None])[:, 0]
        gaps.append(float(behind.max()))
        equal += int(behind.max() == 0)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"answers": len(answers), "equal": equal, "largest_gap_nats": max(gaps)}


def name_of(part: str) -> str:
    """Of a result: one without GPUs is of another thing."""
    return f"publication-{part}" if engine_gpus() else f"publication-{part}-gloo"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the publications after the first, which joins."""
    later = rows[1:] or rows
    medians = {
        name: statistics.median(row[name] for row in later)
        for name in ("call_seconds", "transfer_seconds", "load_seconds", "probe_seconds", "pause_seconds")
    }
    size = later[0]["bytes"]
    return {
        **medians,
        "gb": size / 1e9,
        "transfer_gb_per_second": size / 1e9 / medians["transfer_seconds"],
        "extra_gib": max(row["extra_bytes"] for row in rows) / 2**30,
        "first_call_seconds": rows[0]["call_seconds"],
    }


async def push_part(settings: dict[str, Setting], pushes: int, out: Path) -> None:
    """Label of the result → setting."""
    for label, setting in settings.items():
        result = results.begin(name_of(label), {**vars(setting), "pushes": pushes, "seed": SEED})
        rows, answers, facts = await measured(setting, pushes)
        result.samples = {"publications": rows}
        result.summary = {**summary(rows), **facts, "greedy": await asyncio.to_thread(compare_greedy, setting, answers)}
        _finish(result, out)


class Stock:
    """vLLM's own sender and receiver, started beside ours and measured after them."""

    def __init__(self, setting: Setting, pushes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-"))
        write_model(self._folder, setting.shape, setting.dtype)
        command = [sys.executable, "-m", "benchmarks.stock_publication", str(self._folder), setting.dtype, str(pushes)]
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [*command, str(self._folder / "go")], stdout=self._log, stderr=subprocess.STDOUT
        )

    def measure(self) -> dict[str, Any]:
        """Lets it begin, and waits for its result."""
        (self._folder / "go").touch()
        try:
            self._process.wait(STOCK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self._log.seek(0)
        text = self._log.read()
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(f"vLLM's own senders: exit code {self._process.returncode}\n{text[-4000:]}")
        found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
        return found

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


async def nccl_part(setting: Setting, pushes: int, out: Path, *, with_stock: bool) -> None:
    """Ours and vLLM's in one run. A failure of theirs does not lose ours."""
    result = results.begin(name_of("nccl"), {**vars(setting), "pushes": pushes, "seed": SEED})
    stock = Stock(setting, pushes) if with_stock else None
    try:
        rows, answers, facts = await measured(setting, pushes)
        result.samples = {"publications": rows}
        result.summary = {**summary(rows), **facts, "greedy": await asyncio.to_thread(compare_greedy, setting, answers)}
        _finish(result, out)
        if stock is not None:
            found = await asyncio.to_thread(stock.measure)
            for kind in ("packed", "per_tensor"):
                result.samples |= {f"stock_{kind}_{name}": seconds for name, seconds in found[kind].items()}
                median = statistics.median(found[kind]["update_call_seconds"][1:])
                result.summary[f"stock_{kind}_update_call_seconds"] = median
                result.summary[f"stock_{kind}_to_ours"] = median / result.summary["transfer_seconds"]
            _finish(result, out)
    finally:
        if stock is not None:
            stock.close()


async def failures_part(setting: Setting, out: Path) -> None:
    """Each fault in the middle of a publication: what every party says and when, who is alive, and the next push."""
    result = results.begin(name_of("failures"), {**vars(setting), "deadline_seconds": ORDERED_DEADLINE_SECONDS})
    config = PublicationConfig(
        bucket_mib=setting.bucket_mib,
        deadline_seconds=ORDERED_DEADLINE_SECONDS,
        transport=setting.transport,  # type: ignore[arg-type]
    )
    rows: list[dict[str, Any]] = []
    async with services(setting) as own:
        publication = Publication(own.workers, config, setting.dtype)

        async def good() -> bool:
            """Whether a push over whoever is there succeeds, and the engine then serves."""
            nonlocal publication
            own.fresh_workers()
            await own.up()
            publication = Publication(own.workers, config, setting.dtype, after_epoch=int(time.time()))
            await publication.publish(0)
            (engine,) = own.workers.rollouts()
            answers = await greedy_of_engine(engine, setting.shape)
            return all(len(answer) == ANSWER_TOKENS for answer in answers)

        await publication.publish(0)
        rows.append({"fault": "refused push", **await _refused(own), "next_push_good": await good()})
        print("  " + json.dumps(rows[-1]), flush=True)
        for fault in ("raise 3", "kill 3", "stand 3", "kill-pid"):
            (engine,) = own.workers.rollouts()
            core = (await engine.state()).pids[1]
            word = f"{fault} {core}" if fault == "kill-pid" else fault
            (own.folder / "fault").write_text(word)
            begin = time.monotonic()
            row: dict[str, Any] = {"fault": {"kill-pid": "engine killed"}.get(fault, f"rank: {fault}")}
            row["publication_says"] = await _told(publication.publish(0))
            row["seconds"] = time.monotonic() - begin
            row["engine"] = await _state_of(engine)
            row["learner"] = await _state_of(own.workers.learner())
            if fault == "kill-pid":
                await own.end("rollout")
                await own.start_engine()
            else:
                await own.end("learner")
                await own.start_learner()
            row["next_push_good"] = await good()
            rows.append(row)
            print("  " + json.dumps(row), flush=True)
    result.samples = {"faults": rows}
    result.summary = {
        "all_told": all(row["publication_says"] for row in rows),
        "all_next_pushes_good": all(row["next_push_good"] for row in rows),
        "longest_seconds": max(row.get("seconds", 0.0) for row in rows),
    }
    _finish(result, out)


async def _refused(own: Services) -> dict[str, Any]:
    """An engine that is offered a manifest with a tensor too few and one too many: it names both, and serves on."""
    from antiphon.learner.v1 import learner_pb2

    (engine,) = own.workers.rollouts()
    request = learner_pb2.JoinTransferRequest(
        request_id=new_request_id(),
        epoch=1000,
        transport=_transport(own.setting),
        receiver_ranks=1,
        bucket_bytes=1 << 26,
        deadline_seconds=ORDERED_DEADLINE_SECONDS,
    )
    manifest = await own.workers.learner().join_transfer(request, CALL_SECONDS)
    name = manifest.tensors[3].name
    manifest.tensors[3].name = "not.a.tensor"
    join = rollout_pb2.JoinTransferRequest(request_id=new_request_id(), manifest=manifest)
    answer = await engine.join_transfer(join, CALL_SECONDS)
    told = f"unknown {list(answer.unknown_tensors)}, missing {list(answer.missing_tensors)}"
    return {
        "publication_says": told
        if answer.unknown_tensors == ["not.a.tensor"] and answer.missing_tensors == [name]
        else "",
        "engine": await _state_of(engine),
    }


def _transport(setting: Setting) -> Any:
    from antiphon.types.v1 import transfer_pb2

    on_gpus = bool(engine_gpus())
    return transfer_pb2.TRANSPORT_NCCL if on_gpus else transfer_pb2.TRANSPORT_GLOO


async def _told(call: Awaitable[Any]) -> str:
    """What the error says; empty when there was none."""
    try:
        await call
    except AntiphonError as error:
        return f"{type(error).__name__}: {error}".replace(f"{results.ROOT}/", "")[:600]
    return ""


async def _state_of(client: Any) -> str:
    try:
        state = await asyncio.wait_for(client.state(), CALL_SECONDS)
    except (AntiphonError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return str(tenant_pb2.WorkerState.Name(state.state).removeprefix("WORKER_STATE_"))


def _finish(result: results.Result, out: Path) -> None:
    path = results.write(result, out / f"{result.name}.json")
    print(f"{result.name}: {json.dumps(result.summary)}\n  {path}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Publications between learner and engine, measured.")
    parser.add_argument("--parts", default="nccl,ipc,greedy,tp2,failures")
    parser.add_argument("--shape", choices=[*SHAPES], default="7b")
    parser.add_argument("--small-shape", choices=[*SHAPES], default="tp2", help="in float32, and of failures")
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    arguments = parser.parse_args()
    on_gpus = bool(engine_gpus())
    dtype = "bfloat16" if on_gpus else "float32"
    small = arguments.small_shape
    apart = Setting(arguments.shape, dtype, learner_gpus="0", engine_gpus="1", eager=False)
    together = Setting(arguments.shape, dtype, learner_gpus="0", engine_gpus="0", eager=False)
    greedy = {
        "greedy-nccl": Setting(small, "float32", learner_gpus="0", engine_gpus="1", bucket_mib=8),
        "greedy-ipc": Setting(small, "float32", learner_gpus="0", engine_gpus="0", bucket_mib=8),
    }
    both = {"learner_gpus": "0,1", "engine_gpus": "0,1", "ranks": 2, "tensor_parallel": 2}
    shared = {"tp2-float32": Setting(small, "float32", bucket_mib=8, **both)}  # type: ignore[arg-type]
    if on_gpus:
        shared["tp2-bfloat16"] = Setting(arguments.shape, "bfloat16", **both)  # type: ignore[arg-type]
    broken = Setting(small, "float32", "0", "1", bucket_mib=1, kv_gib=1.0)
    failed = []
    for part in arguments.parts.split(","):
        print(f"== {part}", flush=True)
        begin = time.monotonic()
        try:
            if part == "nccl":
                asyncio.run(nccl_part(apart, arguments.pushes, arguments.out, with_stock=on_gpus))
            elif part == "failures":
                asyncio.run(failures_part(broken, arguments.out))
            else:
                settings = {"ipc": {"ipc": together}, "greedy": greedy, "tp2": shared}[part]
                asyncio.run(push_part(settings, arguments.pushes, arguments.out))
        except Exception:  # the other parts are still worth their time
            traceback.print_exc()
            failed.append(part)
        print(f"== {part}: {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
