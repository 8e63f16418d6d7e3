"""Spike: a weight receiver inside vLLM's worker, over a private NCCL group or CUDA IPC, that loads in place.

Loaded in vLLM's process by `worker_extension_cls`; registers itself with vLLM's weight-transfer factory.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from benchmarks.spikes.gpu_seams.plan import DTYPES, make_group, plan, slice_numel, wait


@dataclass
class Init(WeightTransferInitInfo):
    address: str
    prefix: str
    dtype: str
    tensors: str  # JSON [[name, shape], ...]
    bucket_bytes: int
    sender_ranks: int = 1
    receiver_ranks: int = 1
    transport: str = "nccl"
    deadline: float = 60.0


@dataclass
class Update(WeightTransferUpdateInfo):
    deadline: float = 10.0
    abort: bool = True
    outstanding: int = 2


class SpikeEngine(WeightTransferEngine[Init, Update]):
    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Init) -> None:
        self.info = init_info
        self.dtype = DTYPES[init_info.dtype]
        tensors = [(name, shape) for name, shape in json.loads(init_info.tensors)]
        self.buckets = plan(tensors, self.dtype.itemsize, init_info.bucket_bytes)
        size = max(sum(n for _, _, n in b) for b in self.buckets)
        me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.me = me
        self.pushes = 0
        if init_info.transport == "ipc":
            host, port = init_info.address.rsplit(":", 1)
            self.store = PrefixStore(
                init_info.prefix,
                TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=init_info.deadline)),
            )
            self.remote = []
            for rank in range(init_info.sender_ranks):
                views = []
                for slot in range(2):
                    handle = json.loads(self.store.get(f"handle/{rank}/{slot}"))
                    storage = torch.UntypedStorage._new_shared_cuda(
                        handle["device"],
                        bytes.fromhex(handle["handle"]),
                        handle["bytes"],
                        handle["offset"],
                        bytes.fromhex(handle["counter"]),
                        handle["counter_offset"],
                        bytes.fromhex(handle["event"]),
                        handle["event_sync"],
                    )
                    flat = torch.tensor([], dtype=self.dtype, device=f"cuda:{handle['device']}").set_(storage)
                    views.append(flat[: handle["numel"]])
                self.remote.append(views)
            self.buffers = [torch.empty(size, dtype=self.dtype, device=self.device)]
            return
        _, self.group = make_group(
            init_info.address, init_info.prefix, 1 + me, 1 + init_info.receiver_ranks, init_info.deadline
        )
        warm = torch.zeros(1024, device=self.device)
        options = BroadcastOptions()
        options.rootRank = 0
        wait(self.group.broadcast([warm], options), time.monotonic() + init_info.deadline, "warm-up")
        self.buffers = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2)]

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: Update) -> None:
        (self._by_ipc if self.info.transport == "ipc" else self._by_nccl)(update_info)

    def _by_nccl(self, info: Update) -> None:
        end = time.monotonic() + info.deadline
        options = BroadcastOptions()
        options.rootRank = 0
        works: list[Any] = []
        count = len(self.buckets)

        def post(index: int) -> None:
            numel = sum(n for _, _, n in self.buckets[index])
            works.append(self.group.broadcast([self.buffers[index % 2][:numel]], options))

        try:
            for index in range(min(info.outstanding, count)):
                post(index)
            for index in range(count):
                wait(works[index], end, f"bucket {index + 1}/{count}")
                self._load(index, self.buffers[index % 2])
                if index + info.outstanding < count:
                    torch.cuda.current_stream().synchronize()  # the buffer is free again
                    post(index + info.outstanding)
        except TimeoutError:
            if info.abort:
                began = time.monotonic()
                self.group.abort()
                self.aborted_in = time.monotonic() - began
            raise

    def _by_ipc(self, info: Update) -> None:
        ranks = self.info.sender_ranks
        self.store.set_timeout(timedelta(seconds=info.deadline))
        for index, bucket in enumerate(self.buckets):
            target = self.buffers[0]
            for rank in range(ranks):
                self.store.wait([f"ready/{rank}/{self.pushes}/{index}"])
                source, cursor, offset = self.remote[rank][index % 2], 0, 0
                for _, _, numel in bucket:
                    part = slice_numel(numel, rank, ranks)
                    start = offset + min(numel, rank * -(-numel // ranks))
                    target[start : start + part].copy_(source[cursor : cursor + part], non_blocking=True)
                    cursor, offset = cursor + part, offset + numel
            torch.cuda.synchronize()
            for rank in range(ranks):
                self.store.add(f"taken/{rank}/{self.pushes}/{index}", 1)
            self._load(index, target)
            torch.cuda.current_stream().synchronize()
        self.pushes += 1

    def _load(self, index: int, flat: torch.Tensor) -> None:
        weights, cursor = [], 0
        for name, shape, numel in self.buckets[index]:
            weights.append((name, flat[cursor : cursor + numel].view(shape)))
            cursor += numel
        self.model.load_weights(iter(weights))

    def shutdown(self) -> None:
        pass


class SpikeWorker:
    """Mixed into vLLM's worker: what the driver asks for by collective_rpc."""

    def spike_memory(self) -> dict[str, float]:
        free, total = torch.cuda.mem_get_info()
        return {"free_gib": free / 2**30, "used_gib": (total - free) / 2**30}

    def spike_device_answers(self, seconds: float) -> dict[str, Any]:
        """Whether the device still finishes work: the compute stream, then everything on it."""
        result: dict[str, Any] = {"abort_seconds": getattr(self.weight_transfer_engine, "aborted_in", None)}  # type: ignore[attr-defined]

        def probe() -> None:
            began = time.monotonic()
            torch.cuda.current_stream().synchronize()
            result["stream"] = time.monotonic() - began
            torch.cuda.synchronize()
            result["device"] = time.monotonic() - began

        thread = threading.Thread(target=probe, daemon=True)
        thread.start()
        thread.join(seconds)
        return result

    def spike_reset(self) -> None:
        """Drops the group and its buffers, as before joining a new epoch."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        for name in ("group", "buffers", "remote", "store"):
            if hasattr(engine, name):
                delattr(engine, name)
        torch.cuda.empty_cache()


if "spike" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("spike", SpikeEngine)
