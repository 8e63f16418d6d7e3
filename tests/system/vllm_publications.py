"""The learner's side of a publication for the tests of the vLLM engine: plain transformers models and real senders."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from antiphon.types.v1 import transfer_pb2

from services.common.weights.manifest import element_type
from services.common.weights.sender import Sender, SendReport
from services.common.weights.store import bind_store

BUCKET_BYTES = 200_000  # a handful of buckets of the tiny model

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["numba", "services.common.weights.digest", "services.common.weights.sender"])


def describe(model: Any, address: str, epoch: int) -> transfer_pb2.TransferManifest:
    """The manifest of one sender rank and one receiver."""
    manifest = transfer_pb2.TransferManifest(
        epoch=epoch,
        address=address,
        transport=transfer_pb2.TRANSPORT_GLOO,
        sender_ranks=1,
        receiver_ranks=1,
        bucket_bytes=BUCKET_BYTES,
    )
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        alias = first.setdefault(tensor.data_ptr(), name)
        spec = manifest.tensors.add(name=name, shape=list(tensor.shape), element_type=element_type(tensor.dtype))
        if alias != name:
            spec.alias_of = alias
        else:
            spec.slice_numel.append(tensor.numel())
    return manifest


class ThreadSender:
    """A learner rank in a thread of this process."""

    def __init__(self, model: Any, epoch: int) -> None:
        self._model = model
        self._store, address = bind_store()
        self.manifest = describe(model, address, epoch)
        self._sender: Sender | None = None

    def connect(self) -> None:
        """Blocks until the receiver came."""
        self._sender = Sender(self.manifest, 0, store=self._store, deadline_seconds=30)

    def send(self) -> SendReport:
        assert self._sender is not None
        weights = self._model.state_dict()
        return self._sender.send(lambda spec: weights[spec.name].reshape(-1), deadline_seconds=30)


def _doomed_rank(pipe: Connection, weights: dict[str, torch.Tensor], die_at_bucket: int) -> None:
    store, address = bind_store()
    pipe.send(address)
    manifest = transfer_pb2.TransferManifest.FromString(pipe.recv())
    sender = Sender(manifest, 0, store=store, deadline_seconds=30)

    def on_bucket(done: int, of: int) -> None:
        if done == die_at_bucket:
            os.kill(os.getpid(), signal.SIGKILL)

    pipe.recv()  # "send"
    if die_at_bucket == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    report = sender.send(lambda spec: weights[spec.name].reshape(-1), deadline_seconds=30, on_bucket=on_bucket)
    pipe.send(report.digest)
    pipe.recv()  # stays until it is killed


class DoomedSender:
    """A learner rank in a process that kills itself once so many buckets are through."""

    def __init__(self, model: Any, epoch: int, die_at_bucket: int) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_doomed_rank, args=(theirs, weights, die_at_bucket), daemon=True)
        self.process.start()
        theirs.close()
        self.manifest = describe(model, self._answer(), epoch)
        self._pipe.send(self.manifest.SerializeToString())

    def send(self) -> None:
        self._pipe.send("send")

    def digest(self) -> int:
        """After a whole send."""
        return int(self._answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def _answer(self) -> Any:
        assert self._pipe.poll(30), "the sender did not answer within 30 s"
        return self._pipe.recv()


@contextmanager
def doomed(model: Any, epoch: int, die_at_bucket: int) -> Iterator[DoomedSender]:
    sender = DoomedSender(model, epoch, die_at_bucket)
    try:
        yield sender
    finally:
        sender.kill()


def shaken(model: Any, seed: int, scale: float = 0.05) -> None:
    """Moves every parameter: embedding, head and layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def token_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of each token but the first, by transformers in float64 softmax."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].double()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [float(table[i, token]) for i, token in enumerate(token_ids[1:])]


def greedy(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of prompts of one length, without an end token, by plain forwards."""
    ids = torch.tensor(prompts)
    width = ids.shape[1]
    with torch.no_grad():
        for _ in range(max_tokens):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[:, width:].tolist()
