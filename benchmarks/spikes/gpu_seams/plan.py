"""Spike: what both ends of the pipe share: the cut into buckets, the private NCCL group, the polled wait."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupNCCL, TCPStore

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def plan(
    tensors: list[tuple[str, list[int]]], itemsize: int, bucket_bytes: int
) -> list[list[tuple[str, list[int], int]]]:
    """Buckets of (name, shape, numel): consecutive tensors up to bucket_bytes."""
    buckets: list[list[tuple[str, list[int], int]]] = [[]]
    filled = 0
    for name, shape in tensors:
        numel = 1
        for side in shape:
            numel *= side
        if buckets[-1] and filled + numel * itemsize > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, shape, numel))
        filled += numel * itemsize
    return buckets


def slice_numel(numel: int, rank: int, ranks: int) -> int:
    """Elements of a flat tensor that ZeRO-3 rank `rank` holds: equal parts, the last ones cut."""
    part = -(-numel // ranks)
    return max(0, min(numel, (rank + 1) * part) - rank * part)


def make_group(address: str, prefix: str, rank: int, size: int, deadline: float) -> tuple[Any, Any]:
    """A private NCCL group that does not tear its process down when a peer dies."""
    host, port = address.rsplit(":", 1)
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        return store, ProcessGroupNCCL(PrefixStore(prefix, store), rank, size, options)
    finally:
        os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)


def wait(work: Any, deadline: float, what: str) -> None:
    """Polls until the work is complete or the deadline (a monotonic time) has passed."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.0002)
