"""Spike: the sending process. A plain torch model or DeepSpeed ZeRO-3 ranks; NCCL or CUDA IPC.

Run by driver.py, one process per rank; answers one JSON line per push on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from benchmarks.spikes.gpu_seams.plan import DTYPES, make_group, plan, slice_numel, wait


def say(**fields: Any) -> None:
    print("SPIKE " + json.dumps(fields), flush=True)


def build(args: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor], list[tuple[str, list[int]]]]:
    """(model or None, flat slice of this rank by name, [(name, shape)])."""
    if args.shapes:  # random weights of a given shape: for timing
        tensors = [(n, s) for n, s in json.loads(Path(args.shapes).read_text())]
        generator = torch.Generator(device="cuda").manual_seed(args.seed)
        slices = {}
        for name, shape in tensors:
            numel = int(torch.tensor(shape).prod())
            part = slice_numel(numel, args.rank, args.ranks)
            slices[name] = (torch.randn(part, device="cuda", generator=generator) * 0.02).to(DTYPES[args.dtype])
        return None, slices, tensors
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype])
    if args.perturb:
        generator = torch.Generator().manual_seed(args.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * args.perturb * parameter.float().std()
                parameter.add_(noise.to(parameter.dtype))
    seen: dict[int, str] = {}
    tensors = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:
            seen[id(parameter)] = name
            tensors.append((name, list(parameter.shape)))
    if args.zero3:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": args.dtype == "bfloat16"},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
            config=config,
            dist_init_required=True,
        )
        held = {
            name: p.ds_tensor.detach().view(-1)[: slice_numel(p.ds_numel, args.rank, args.ranks)]
            for name, p in engine.module.named_parameters()
        }
        return engine, held, tensors
    model = model.cuda().eval()
    held = {name: p.detach().view(-1) for name, p in model.named_parameters()}
    return model, held, tensors


def greedy(model: Any, prompts: list[list[int]], steps: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(steps):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1]
            ids.append(int(logits.float().argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def main() -> None:  # noqa: PLR0912, PLR0915 - one experiment, read from top to bottom
    parser = argparse.ArgumentParser()
    for name in ("--model", "--shapes", "--address", "--prefix", "--prompts"):
        parser.add_argument(name, default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--transport", default="nccl")
    for name, value in (
        ("--rank", 0),
        ("--ranks", 1),
        ("--receivers", 1),
        ("--seed", 0),
        ("--pushes", 1),
        ("--kill-at", -1),
    ):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--perturb", type=float, default=0.0)
    parser.add_argument("--zero3", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(args.rank if args.ranks > 1 else 0)
    host, port = args.address.rsplit(":", 1)
    master = TCPStore(host, int(port), is_master=args.rank == 0, timeout=timedelta(seconds=300), wait_for_workers=False)
    store = PrefixStore(args.prefix, master)
    model, slices, tensors = build(args)
    itemsize = DTYPES[args.dtype].itemsize
    buckets = plan(tensors, itemsize, args.bucket_bytes)
    size = max(sum(slice_numel(n, args.rank, args.ranks) for _, _, n in b) for b in buckets)
    buffers = [torch.empty(size, dtype=DTYPES[args.dtype], device="cuda") for _ in range(2)]
    if args.rank == 0:
        store.set("manifest", json.dumps(tensors))
    options = BroadcastOptions()
    options.rootRank = 0
    if args.transport == "nccl":
        _, group = make_group(args.address, args.prefix, 0, 1 + args.receivers, 60.0)
        say(event="joined")
        wait(group.broadcast([torch.zeros(1024, device="cuda")], options), time.monotonic() + 60, "warm-up")
    else:
        for slot, buffer in enumerate(buffers):
            device, handle, nbytes, offset, counter, counter_offset, event, sync = (
                buffer.untyped_storage()._share_cuda_()
            )
            store.set(
                f"handle/{args.rank}/{slot}",
                json.dumps(
                    {
                        "device": device,
                        "handle": handle.hex(),
                        "bytes": nbytes,
                        "offset": offset,
                        "counter": counter.hex(),
                        "counter_offset": counter_offset,
                        "event": event.hex(),
                        "event_sync": sync,
                        "numel": size,
                    }
                ),
            )
        say(event="joined")
    for push in range(args.pushes):
        sys.stdin.readline()
        began = time.monotonic()
        works: list[Any] = []
        total = 0
        for index, bucket in enumerate(buckets):
            if index == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if index >= 2:
                if args.transport == "nccl":
                    wait(works[index - 2], time.monotonic() + 60, "send")
                else:
                    while store.add(f"taken/{args.rank}/{push}/{index - 2}", 0) < args.receivers:
                        time.sleep(0.00005)
            cursor = 0
            for name, _, numel in bucket:
                part = slice_numel(numel, args.rank, args.ranks)
                buffers[index % 2][cursor : cursor + part].copy_(slices[name], non_blocking=True)
                cursor += part
            total += cursor * itemsize
            if args.transport == "nccl":
                works.append(group.broadcast([buffers[index % 2][:cursor]], options))
            else:
                torch.cuda.synchronize()
                store.set(f"ready/{args.rank}/{push}/{index}", "1")
        if args.transport == "nccl":
            for work in works[-2:]:
                wait(work, time.monotonic() + 60, "send")
        else:
            while store.add(f"taken/{args.rank}/{push}/{len(buckets) - 1}", 0) < args.receivers:
                time.sleep(0.00005)
        say(event="pushed", push=push, seconds=time.monotonic() - began, gigabytes=total / 1e9, buckets=len(buckets))
    if args.prompts and model is not None:
        say(event="greedy", tokens=greedy(model, json.loads(args.prompts), 16))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
