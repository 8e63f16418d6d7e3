"""What a transport offers to the two ends of the pipe: one sender as the root, every receiver, messages in order.

A message is a run of bytes (1-D uint8) on the group's device. At most two are under way: while one travels, the root
fills the next, and the receivers use up the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
from antiphon.types.v1 import transfer_pb2
from antiphon.types.v1.transfer_pb2 import TransferManifest
from torch.distributed import Store

from services.common.errors import AntiphonError, Expired, InvalidRequest, Unavailable
from services.common.weights import manifest as cuts
from services.common.weights.store import Meeting

ROOT = 0
OUTSTANDING = 2
"""Messages that may be under way, and buffers for them at each end."""
POLL_SECONDS = 0.00005


class Pending:
    """A message on its way. Its bytes must not be touched until `Group.wait` returned."""

    def __init__(self, number: int, what: str, work: torch.distributed.Work | None, message: torch.Tensor) -> None:
        self.number = number
        """Counted from 0 over the life of the group, equally at every member."""
        self.what = what
        """Its name in errors."""
        self.work = work
        self.message = message


class Group(Protocol):
    """A private group. A member that fails, leaves or dies ends the waits of the others with an error.

    After any error the group is broken: `close` it and make a new epoch. The process goes on. `end` is a time of
    time.monotonic everywhere. `close` may be called twice, and from another thread to end a wait under way.
    """

    reuses_memory: bool
    """Whether a received message is overwritten once it was released; else it is the receiver's own."""

    def buffer(self, number: int, size: int) -> torch.Tensor:
        """Root: where message `number`, of `size` bytes, is to be put; free once number − OUTSTANDING is through."""
        ...

    def send(self, number: int, message: torch.Tensor, end: float, what: str) -> Pending:
        """Root: starts to send what was put there, after the device's work so far."""
        ...

    def receive(self, number: int, size: int, end: float, what: str) -> Pending:
        """Receiver: starts to receive."""
        ...

    def wait(self, pending: Pending, end: float) -> torch.Tensor:
        """The bytes, once they are through. Raises Expired at the deadline, Unavailable when a peer is gone."""
        ...

    def release(self, pending: Pending) -> None:
        """Receiver: the bytes have been used up, by work that the device may still be doing."""
        ...

    def close(self, why: str = "it left") -> None: ...


def polled(done: Callable[[], bool], meeting: Meeting, pending: Pending, end: float) -> None:
    """Waits until `done`. Raises Expired at the end, Unavailable when another member gave up or is gone."""
    while not done():
        if time.monotonic() >= end:
            raise late(meeting.name, pending.what)
        meeting.check(pending.what)
        time.sleep(POLL_SECONDS)


def late(name: str, what: str) -> Expired:
    return Expired(f"{name}: {what} was not through at the deadline; make a new epoch")


def open_group(
    manifest: TransferManifest,
    sender_rank: int,
    rank: int,
    *,
    store: Store,
    device: torch.device,
    left: threading.Event | None,
    end: float,
) -> Group:
    """Joins the group of one sender rank, as its root (`rank` 0) or as receiver `rank` − 1, and warms it.

    Blocks until everybody came; `left`, set by another thread, ends that. Raises Unavailable when somebody did not,
    InvalidRequest when the manifests differ or the device is not one that this transport works on.
    """
    size = 1 + manifest.receiver_ranks
    meeting = Meeting(store, f"{manifest.epoch}/{sender_rank}", rank, size, left)
    on_gpu = manifest.transport != transfer_pb2.TRANSPORT_GLOO
    if on_gpu != (device.type == "cuda"):
        name, place = transfer_pb2.Transport.Name(manifest.transport), "a GPU" if on_gpu else "CPU"
        raise InvalidRequest(f"{meeting.name}: {name} carries weights that are on {place}, here they are on {device}")
    largest = max((cuts.layout(bucket, sender_rank)[1] for bucket in cuts.buckets(manifest)), default=0)
    try:
        meeting.come(cuts.fingerprint(manifest), end)
        if manifest.transport == transfer_pb2.TRANSPORT_GLOO:
            from services.common.weights.gloo import GlooGroup

            return GlooGroup(meeting, rank, size, address=manifest.address, end=end)
        if manifest.transport == transfer_pb2.TRANSPORT_NCCL:
            from services.common.weights.nccl import NcclGroup

            return NcclGroup(meeting, rank, size, device=device, largest=largest, end=end)
        from services.common.weights.cuda_ipc import CudaIpcGroup

        return CudaIpcGroup(meeting, rank, size, device=device, largest=largest, end=end)
    except AntiphonError as error:
        meeting.give_up(str(error))
        raise
    except RuntimeError as error:
        meeting.give_up(first_line(error))
        raise Unavailable(f"{meeting.name}: joining failed ({first_line(error)}); make a new epoch") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
