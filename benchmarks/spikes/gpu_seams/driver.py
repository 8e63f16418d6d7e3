"""Spike: the seams that only GPUs can prove (docs/design.md §6 and §7), one experiment a name.

    python -m benchmarks.spikes.gpu_seams.driver {push,kill,ipc,ipc7b,tp2} --model DIR --out FILE

push  7.6B random weights, GPU 0 to vLLM on GPU 1 over NCCL, loaded in place; three pushes, timed
kill  the sender is killed in the middle of a push: does the engine generate afterwards, is the next push right
ipc   one GPU: engine asleep at level 2, refilled by CUDA IPC from a DeepSpeed ZeRO-3 process on the same GPU
ipc7b the same with random weights of a 7B shape, for time
tp2   two ZeRO-3 ranks and a tensor-parallel engine over the same two GPUs, by CUDA IPC
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, n] for n in range(20, 28)]
SHAPE_7B = {"hidden": 3584, "layers": 28, "inter": 18944, "vocab": 152064, "kv": 512}


def shapes_7b() -> list[tuple[str, list[int]]]:
    """Names and shapes of Qwen2.5-7B as Hugging Face has them."""
    h, inter, kv = SHAPE_7B["hidden"], SHAPE_7B["inter"], SHAPE_7B["kv"]
    tensors: list[tuple[str, list[int]]] = [("model.embed_tokens.weight", [SHAPE_7B["vocab"], h])]
    for n in range(SHAPE_7B["layers"]):
        at = f"model.layers.{n}"
        for name, rows in (("q", h), ("k", kv), ("v", kv)):
            tensors += [(f"{at}.self_attn.{name}_proj.weight", [rows, h]), (f"{at}.self_attn.{name}_proj.bias", [rows])]
        tensors += [(f"{at}.self_attn.o_proj.weight", [h, h])]
        tensors += [(f"{at}.mlp.gate_proj.weight", [inter, h]), (f"{at}.mlp.up_proj.weight", [inter, h])]
        tensors += [(f"{at}.mlp.down_proj.weight", [h, inter])]
        tensors += [(f"{at}.input_layernorm.weight", [h]), (f"{at}.post_attention_layernorm.weight", [h])]
    return [*tensors, ("model.norm.weight", [h]), ("lm_head.weight", [SHAPE_7B["vocab"], h])]


def write_7b(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "hidden_size": SHAPE_7B["hidden"],
                "num_hidden_layers": SHAPE_7B["layers"],
                "intermediate_size": SHAPE_7B["inter"],
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": SHAPE_7B["vocab"],
                "max_position_embeddings": 4096,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "bos_token_id": 0,
                "eos_token_id": 1,
            }
        )
    )
    (folder / "shapes.json").write_text(json.dumps(shapes_7b()))
    return folder


def write_llama(folder: Path) -> Path:
    """Random weights in a shape that two ranks can split (SmolLM2 has nine heads)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=49152,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Sender:
    """A sending process (or one per ZeRO-3 rank), and the lines it prints."""

    def __init__(
        self, epoch: int, address: str, *, ranks: int = 1, env: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.prefix, self.address, self.ranks, self.options, self.env = (
            f"epoch{epoch}",
            address,
            ranks,
            options,
            env or {},
        )
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        master = str(free_port())
        for rank in range(self.ranks):
            command = [
                sys.executable,
                "-m",
                "benchmarks.spikes.gpu_seams.sender",
                "--address",
                self.address,
                "--prefix",
                self.prefix,
            ]
            command += ["--rank", str(rank), "--ranks", str(self.ranks)]
            for name, value in self.options.items():
                command += (
                    [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
                )
            env = {
                **os.environ,
                **self.env,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": master,
            }
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    *command, env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24
                )
            )

    async def line(self, event: str, seconds: float = 120.0) -> list[dict[str, Any]]:
        async def one(process: asyncio.subprocess.Process) -> dict[str, Any]:
            assert process.stdout is not None
            while True:
                raw = await asyncio.wait_for(process.stdout.readline(), seconds)
                if not raw:
                    raise RuntimeError(f"sender ended with {await process.wait()}")
                text = raw.decode()
                if text.startswith("SPIKE ") and json.loads(text[6:])["event"] == event:
                    return dict(json.loads(text[6:]))

        return await asyncio.gather(*(one(p) for p in self.processes))

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")

    async def end(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def make_engine(model: str, *, dummy: bool, tp: int = 1, share: float = 0.3) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        load_format="dummy" if dummy else "auto",
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=share,
        max_model_len=1024,
        tensor_parallel_size=tp,
        enable_sleep_mode=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        worker_extension_cls="benchmarks.spikes.gpu_seams.receiver.SpikeWorker",
        weight_transfer_config={"backend": "spike"},
    )
    return AsyncLLM.from_engine_args(arguments)


async def generate(engine: Any, seconds: float = 60.0, steps: int = 16) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def one(prompt: list[int]) -> list[int]:
        parameters = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
        last: Any = None
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), parameters, os.urandom(8).hex()):
            last = output
        return list(last.outputs[0].token_ids)

    return await asyncio.wait_for(asyncio.gather(*(one(p) for p in PROMPTS)), seconds)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


async def join(engine: Any, sender: Sender, tensors: str, **extra: Any) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    info = {
        "address": sender.address,
        "prefix": sender.prefix,
        "dtype": "bfloat16",
        "tensors": tensors,
        "bucket_bytes": 512 << 20,
    }
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={**info, **extra}))


async def push(engine: Any, sender: Sender, **update: Any) -> float:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await engine.start_weight_update()
    sender.go()
    began = time.monotonic()
    await engine.update_weights(WeightTransferUpdateRequest(update_info=update))
    took = time.monotonic() - began
    await engine.finish_weight_update()
    return took


def names_of(model: str) -> str:
    """The manifest of a folder, read from its safetensors header (tied heads are not in it)."""
    from safetensors import safe_open

    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    found.pop("lm_head.weight", None)
    return json.dumps(found)


async def experiment_push(model: str) -> dict[str, Any]:
    folder = write_7b(Path("/tmp/shape-7b"))
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    engine = await make_engine(str(folder), dummy=True)
    before = (await engine.collective_rpc("spike_memory"))[0]
    sender = Sender(
        1, f"127.0.0.1:{free_port()}", env={"CUDA_VISIBLE_DEVICES": "0"}, shapes=folder / "shapes.json", pushes=4
    )
    await sender.start()
    began = time.monotonic()
    await asyncio.gather(join(engine, sender, (folder / "shapes.json").read_text()), sender.line("joined"))
    joined = time.monotonic() - began
    rows = []
    for _ in range(4):
        took, sent = await asyncio.gather(push(engine, sender), sender.line("pushed"))
        rows.append({"update_call_seconds": took, **sent[0]})
    after = (await engine.collective_rpc("spike_memory"))[0]
    await generate(engine)
    await sender.end()
    engine.shutdown()
    return {"join_seconds": joined, "pushes": rows, "extra_gib": after["used_gib"] - before["used_gib"]}


async def experiment_kill(model: str) -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    results = []
    bucket, epoch = 16 << 20, 0
    variants = [
        {"paused": False, "outstanding": 2},
        {"paused": False, "outstanding": 1},
        {"paused": True, "outstanding": 2},
    ]
    engine = await make_engine(model, dummy=False)
    for variant in variants:
        row: dict[str, Any] = dict(variant)
        try:
            for kill_at in (0, 5, -1):
                epoch += 1
                sender = Sender(
                    epoch,
                    f"127.0.0.1:{free_port()}",
                    env={"CUDA_VISIBLE_DEVICES": "0"},
                    model=model,
                    bucket_bytes=bucket,
                    perturb=0.02,
                    seed=epoch,
                    kill_at=kill_at,
                    prompts=json.dumps(PROMPTS),
                )
                await sender.start()
                tensors = json.dumps([[n, s] for n, s in await manifest_from(sender)])
                await asyncio.gather(join(engine, sender, tensors, bucket_bytes=bucket), sender.line("joined"))
                if variant["paused"]:
                    await engine.pause_generation(mode="keep", clear_cache=True)
                began = time.monotonic()
                error = ""
                try:
                    await push(engine, sender, deadline=4.0, outstanding=variant["outstanding"])
                except Exception as failure:
                    error = f"{type(failure).__name__}: {str(failure)[:80]}"
                row[f"kill_at_{kill_at}"] = entry = {"update_seconds": time.monotonic() - began, "error": error}
                entry["device"] = (await engine.collective_rpc("spike_device_answers", args=(5.0,)))[0]
                if variant["paused"]:
                    await engine.resume_generation()
                await engine.reset_prefix_cache()
                try:
                    began = time.monotonic()
                    tokens = await generate(engine, 20.0)
                    entry["generate_seconds"] = time.monotonic() - began
                    if kill_at == -1:
                        trained = (await sender.line("greedy"))[0]["tokens"]
                        entry["greedy_agreement"] = agreement(tokens, trained)
                except TimeoutError:
                    entry["generate"] = "HANGS"
                await engine.collective_rpc("spike_reset")
                await sender.end()
                print("ROW", kill_at, json.dumps(entry), flush=True)
                if entry.get("generate") == "HANGS":
                    raise RuntimeError("hung")
        except Exception as failure:
            row["stopped"] = repr(failure)[:200]
            results.append(row)
            engine.shutdown()
            engine = await make_engine(model, dummy=False)
            continue
        results.append(row)
    engine.shutdown()
    return {"variants": results}


async def manifest_from(sender: Sender) -> list[tuple[str, list[int]]]:
    """What the sender wrote into the store; waits until its model is loaded."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    def read() -> str:
        host, port = sender.address.rsplit(":", 1)
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=120), wait_for_workers=False)
        return PrefixStore(sender.prefix, store).get("manifest").decode()

    return [(n, s) for n, s in json.loads(await asyncio.to_thread(read))]


async def shared_gpu(model: str, *, ranks: int, tp: int, shapes: Path | None = None) -> dict[str, Any]:
    """ZeRO-3 ranks and an engine's workers on the same GPUs: level-2 sleep, refill by IPC, three times.

    With `shapes` the sender holds random weights of those shapes (timing only).
    """
    engine = await make_engine(model, dummy=shapes is not None, tp=tp, share=0.25)
    base = await generate(engine)
    rows, cycles = [], 3
    source: dict[str, Any] = {"shapes": shapes} if shapes else {"model": model, "zero3": True, "perturb": 0.02}
    sender = Sender(
        1,
        f"127.0.0.1:{free_port()}",
        ranks=ranks,
        transport="ipc",
        receivers=tp,
        seed=1,
        pushes=cycles,
        prompts="" if shapes else json.dumps(PROMPTS),
        **source,
    )
    await sender.start()
    tensors = json.dumps(await manifest_from(sender))
    await sender.line("joined")
    joined = False
    for _ in range(cycles):
        awake = await engine.collective_rpc("spike_memory")
        began = time.monotonic()
        await engine.sleep(level=2)
        slept = time.monotonic() - began
        asleep = await engine.collective_rpc("spike_memory")
        began = time.monotonic()
        await engine.wake_up(tags=["weights"])
        woke = time.monotonic() - began
        if not joined:
            await join(engine, sender, tensors, transport="ipc", sender_ranks=ranks, receiver_ranks=tp)
            joined = True
        took, sent = await asyncio.gather(push(engine, sender), sender.line("pushed"))
        began = time.monotonic()
        await engine.wake_up(tags=["kv_cache"])
        rows.append(
            {
                "sleep": slept,
                "wake_weights": woke,
                "update_call_seconds": took,
                "wake_kv": time.monotonic() - began,
                "pushed": sent,
                "freed_gib": [round(b["free_gib"] - a["free_gib"], 2) for a, b in zip(awake, asleep, strict=True)],
            }
        )
        await engine.reset_prefix_cache()
    tokens = await generate(engine)
    if shapes:
        await sender.end()
        engine.shutdown()
        return {"cycles": rows}
    trained = (await sender.line("greedy", 240))[0]["tokens"]
    await sender.end()
    engine.shutdown()
    return {
        "cycles": rows,
        "greedy_agreement": agreement(tokens, trained),
        "changed_from_base": 1 - agreement(tokens, base),
    }


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment", choices=["push", "kill", "ipc", "ipc7b", "tp2"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    import torch
    import vllm

    work = {
        "push": lambda: experiment_push(args.model),
        "kill": lambda: experiment_kill(args.model),
        "ipc": lambda: shared_gpu(args.model, ranks=1, tp=1),
        "ipc7b": lambda: shared_gpu(
            str(write_7b(Path("/tmp/shape-7b"))), ranks=1, tp=1, shapes=Path("/tmp/shape-7b/shapes.json")
        ),
        "tp2": lambda: shared_gpu(str(write_llama(Path("/tmp/llama-tp"))), ranks=2, tp=2),
    }
    began = time.monotonic()
    result = {
        "experiment": args.experiment,
        **await work[args.experiment](),
        "seconds": time.monotonic() - began,
        "versions": {"torch": torch.__version__, "vllm": vllm.__version__, "python": platform.python_version()},
    }
    await asyncio.to_thread(Path(args.out).write_text, json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
