"""Child processes of the pipe's tests: learner ranks as they send. Imported by them, so it holds no test."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from antiphon.types.v1 import transfer_pb2

from services.common.weights.digest import tensor_digest
from services.common.weights.manifest import ELEMENT_TYPES, element_type, slice_range
from services.common.weights.sender import Sender
from services.common.weights.store import bind_store

# (name, shape): odd sizes, a scalar, an empty one, one that is much larger than the others.
SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("embed.weight", (173, 33)),
    ("layers.0.norm", (33,)),
    ("layers.0.q.weight", (17, 33)),
    ("layers.0.scale", ()),
    ("layers.0.empty", (0, 33)),
    ("layers.1.norm", (33,)),
    ("layers.1.q.weight", (17, 33)),
    ("final", (1,)),
]

tensor_digest("", torch.zeros(1), 0)  # loads the kernel before the ranks are forked


def make_model(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model by seed; `final` is always float32 and the norms follow it, so element types are mixed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name == "final" else dtype)
        for name, shape in SHAPES
    }


def make_manifest(
    address: str,
    *,
    epoch: int = 1,
    sender_ranks: int = 1,
    receiver_ranks: int = 1,
    bucket_bytes: int = 1 << 30,
    dtype: torch.dtype = torch.float32,
) -> transfer_pb2.TransferManifest:
    """Slices as ZeRO-3 cuts them: ceil(numel / ranks) each, the last ranks with less or nothing."""
    manifest = transfer_pb2.TransferManifest(
        epoch=epoch,
        address=address,
        transport=transfer_pb2.TRANSPORT_GLOO,
        sender_ranks=sender_ranks,
        receiver_ranks=receiver_ranks,
        bucket_bytes=bucket_bytes,
    )
    for name, tensor in make_model(0, dtype).items():
        share = -(-tensor.numel() // sender_ranks)
        counts = [max(0, min(share, tensor.numel() - rank * share)) for rank in range(sender_ranks)]
        manifest.tensors.add(
            name=name, shape=list(tensor.shape), element_type=element_type(tensor.dtype), slice_numel=counts
        )
    manifest.tensors.add(
        name="lm_head.weight",
        shape=[173, 33],
        element_type=element_type(dtype),
        alias_of="embed.weight",
    )
    return manifest


@dataclass(frozen=True)
class Fate:
    """What happens to a rank once so many buckets are through: it kills itself, or it stands still."""

    die_at_bucket: int | None = None
    stop_at_bucket: int | None = None


def learner_rank(pipe: Connection, rank: int, seed: int, dtype: torch.dtype, fate: Fate) -> None:
    """One rank. Rank 0 binds the store when told "bind"; then each gets a manifest, and sends until told to end."""
    torch.set_num_threads(1)
    store = None
    if pipe.recv() == "bind":
        store, address = bind_store()
        pipe.send(address)
    manifest = transfer_pb2.TransferManifest.FromString(pipe.recv())
    sender = Sender(manifest, rank, store=store, deadline_seconds=20)
    model = make_model(seed, dtype)

    def slice_of(spec: transfer_pb2.TensorSpec) -> torch.Tensor:
        start, stop = slice_range(spec, rank)
        assert ELEMENT_TYPES[spec.element_type] == model[spec.name].dtype
        return model[spec.name].view(-1)[start:stop]

    def on_bucket(done: int, of: int) -> None:
        if done == fate.die_at_bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == fate.stop_at_bucket:
            time.sleep(600)  # the test kills this process

    while pipe.recv() == "send":
        if fate.die_at_bucket == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        report = sender.send(slice_of, deadline_seconds=20, on_bucket=on_bucket)
        pipe.send((report.digest, report.bytes))
    sender.close()
