"""The processes of the pipe's tests: learner ranks that send, and receivers that join. The ranks import it, so it holds
no test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from antiphon.types.v1 import transfer_pb2

from services.common.errors import AntiphonError
from services.common.weights.digest import tensor_digest
from services.common.weights.manifest import ELEMENT_TYPES, element_type, slice_range
from services.common.weights.receiver import Receiver
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

# A server that has torch imported forks the ranks: they start in milliseconds, and share no thread with this process.
# It never uses a GPU, so its children may.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.unit.weights.pipe_processes"])

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
    transport: transfer_pb2.Transport = transfer_pb2.TRANSPORT_GLOO,
) -> transfer_pb2.TransferManifest:
    """Slices as ZeRO-3 cuts them: ceil(numel / ranks) each, the last ranks with less or nothing."""
    manifest = transfer_pb2.TransferManifest(
        epoch=epoch,
        address=address,
        transport=transport,
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


def learner_rank(pipe: Connection, rank: int, *, seed: int, dtype: torch.dtype, fate: Fate, device: str) -> None:
    """One rank, with its weights on `device`.

    Rank 0 binds the store when told "bind"; then each gets a manifest, and sends until told to end. It answers each
    time with digest and bytes; or with its error, of which it then dies.
    """
    torch.set_num_threads(1)
    store = None
    if pipe.recv() == "bind":
        store, address = bind_store()
        pipe.send(address)
    manifest = transfer_pb2.TransferManifest.FromString(pipe.recv())
    sender = Sender(manifest, rank, device=torch.device(device), store=store, deadline_seconds=20)
    model = {name: tensor.to(device) for name, tensor in make_model(seed, dtype).items()}

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
        try:
            report = sender.send(slice_of, deadline_seconds=20, on_bucket=on_bucket)
        except AntiphonError as error:
            pipe.send(str(error))  # before this process leaves: with a GPU that takes seconds
            raise
        pipe.send((report.digest, report.bytes))
    sender.close()


class Learner:
    """Ranks in processes of their own."""

    def __init__(self, ranks: int, dtype: torch.dtype, fates: dict[int, Fate], device: str) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = FORKED.Pipe()
            options = {"seed": 1, "dtype": dtype, "fate": fates.get(rank, Fate()), "device": device}
            process = FORKED.Process(target=learner_rank, args=(theirs, rank), kwargs=options, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.pipes[0].send("bind")
        self.address = self.answer(0)
        for pipe in self.pipes[1:]:
            pipe.send("wait")

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(60), f"rank {rank} did not answer within 60 s"
        return self.pipes[rank].recv()

    def tell(self, message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)


@contextmanager
def learner(
    ranks: int = 2,
    dtype: torch.dtype = torch.float32,
    fates: dict[int, Fate] | None = None,
    device: str = "cpu",
) -> Iterator[Learner]:
    it = Learner(ranks, dtype, fates or {}, device)
    try:
        yield it
    finally:
        for process in it.processes:
            process.kill()
            process.join(10)


def join(manifest: Any, receivers: int = 1, deadline_seconds: float = 20, device: str = "cpu") -> list[Receiver]:
    """Receivers block until all came, so each joins from a thread."""
    joined: list[Receiver | BaseException | None] = [None] * receivers

    def one(rank: int) -> None:
        try:
            joined[rank] = Receiver(manifest, rank, device=torch.device(device), deadline_seconds=deadline_seconds)
        except BaseException as error:
            joined[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(receivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for it in joined:
        if isinstance(it, BaseException):
            raise it
    return [it for it in joined if isinstance(it, Receiver)]


def take(receiver: Receiver, deadline_seconds: float = 10) -> dict[str, torch.Tensor]:
    """On the CPU; copied there where the receiver uses its memory again."""
    return {
        spec.name: tensor.cpu()
        for bucket in receiver.receive(deadline_seconds=deadline_seconds)
        for spec, tensor in bucket
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name
