"""One membership epoch at the engine's end: a thread that joins, and receives publications when it is told to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest

from services.common.errors import AntiphonError, Conflict, Unavailable
from services.common.weights.manifest import sent
from services.common.weights.receiver import Receiver

logger = logging.getLogger(__name__)

Bucket = list[tuple[TensorSpec, torch.Tensor]]


class Transfer:
    """The engine's own loop must not wait for others: all waiting is done in the thread, and `state` is asked for."""

    def __init__(
        self,
        manifest: TransferManifest,
        receiver_rank: int,
        *,
        device: torch.device,
        take: Callable[[Iterable[Bucket], bool], None],
        deadline_seconds: float,
    ) -> None:
        """`take` uses up the buckets of a publication; the flag says whether their memory is used again after each."""
        self.manifest = manifest
        self._device = device
        self._take = take
        self._allocated_before = _allocated(device)
        self._receiver: Receiver | None = None
        self._left = threading.Event()
        self._state: dict[str, Any] = {}
        self._idle = threading.Event()
        self._thread = threading.Thread()
        self._start("joined", lambda: self._join(receiver_rank, deadline_seconds))

    def receive(self, deadline_seconds: float) -> None:
        """Starts to receive one publication."""
        if self._state["phase"] == "failed" or self._thread.is_alive():
            raise Conflict(f"transfer epoch {self.manifest.epoch}: not ready to receive, it is {self._state}")
        self._start("received", lambda: self._receive(deadline_seconds))

    def state(self) -> dict[str, Any]:
        """{"phase": "working" | "joined" | "received" | "failed"}; "received" has also digest, bytes, seconds and
        extra_bytes, "failed" has error (a class of services/common/errors.py) and message.
        """
        return self._state

    def wait(self, seconds: float) -> None:
        """Until the thread has nothing to do, at most so long."""
        self._idle.wait(seconds)

    def close(self) -> None:
        """Leaves the group; a thread that waits for others ends by itself, soon or at its deadline."""
        self._left.set()
        self._idle.set()
        self._state = {"phase": "failed", "error": "Unavailable", "message": "the transfer group was left"}
        if self._receiver is not None:
            self._receiver.close()

    def _start(self, phase: str, work: Callable[[], dict[str, Any]]) -> None:
        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a thread begins on the first GPU
                result = {"phase": phase, **work()}
            except AntiphonError as error:
                result = {"phase": "failed", "error": type(error).__name__, "message": str(error)}
            except Exception as error:
                logger.exception("transfer epoch %d", self.manifest.epoch)
                result = {"phase": "failed", "error": "Internal", "message": repr(error)}
            if not self._left.is_set():
                self._state = result
            self._idle.set()

        self._state = {"phase": "working"}
        self._idle.clear()
        self._thread = threading.Thread(target=run, name=f"transfer epoch {self.manifest.epoch}", daemon=True)
        self._thread.start()

    def _join(self, receiver_rank: int, deadline_seconds: float) -> dict[str, Any]:
        receiver = Receiver(
            self.manifest, receiver_rank, device=self._device, left=self._left, deadline_seconds=deadline_seconds
        )
        if self._left.is_set():
            receiver.close()
        self._receiver = receiver
        return {}

    def _receive(self, deadline_seconds: float) -> dict[str, Any]:
        assert self._receiver is not None
        begin = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        names: list[str] = []

        def buckets() -> Iterator[Bucket]:
            for bucket in self._receiver.receive(deadline_seconds=deadline_seconds):  # type: ignore[union-attr]
                names.extend(spec.name for spec, _ in bucket)
                yield bucket

        with torch.no_grad():
            self._take(buckets(), self._receiver.reuses_memory)
        expected = [spec.name for spec in sent(self.manifest)]
        if names != expected:
            raise Unavailable(f"received other tensors than announced: {sorted({*names} ^ {*expected})[:10]}")
        return {
            "digest": self._receiver.digest,
            "bytes": self._receiver.bytes,
            "seconds": time.monotonic() - begin,
            "extra_bytes": _peak_allocated(self._device) - self._allocated_before,
        }


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _peak_allocated(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
