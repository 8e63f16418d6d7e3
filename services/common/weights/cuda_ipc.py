"""A transfer group within one host's GPUs: receivers map the sender's buffers and read them where they are.

The way for a learner and an engine on the same GPU, for which NCCL has none. Each process opens the raw handles of
OUTSTANDING buffers once; from then on only "ready" and "taken" travel, over the store.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch

from services.common.errors import InvalidRequest, Unavailable
from services.common.weights.store import Meeting
from services.common.weights.transport import OUTSTANDING, ROOT, Pending, first_line, polled


class CudaIpcGroup:
    """See services/common/weights/transport.py. The root holds the buffers; receivers hold none of their own."""

    reuses_memory = True

    def __init__(
        self, meeting: Meeting, rank: int, size: int, *, device: torch.device, largest: int, end: float
    ) -> None:
        """Exports the buffers, or maps them. Raises InvalidRequest when this process cannot map the sender's memory."""
        self._meeting = meeting
        self._is_root = rank == ROOT
        self._receivers = size - 1
        self._device = device
        self._closed = threading.Event()
        self._exports: list[torch.UntypedStorage] = []
        store = meeting.store
        with torch.cuda.device(device):
            if self._is_root:
                self._buffers = _exportable(largest, device)
                self._exports = [_borrowed(buffer) for buffer in self._buffers]
                store.set("handles", json.dumps([_exported(export) for export in self._exports]))
            else:
                handles = Pending(-1, "the handles of the sender's memory", None, torch.empty(0))
                polled(lambda: bool(meeting.ask(lambda s: s.check(["handles"]), handles.what)), meeting, handles, end)
                try:
                    self._buffers = [_mapped(handle, device) for handle in json.loads(store.get("handles"))]
                except RuntimeError as error:
                    raise InvalidRequest(
                        f"{meeting.name}: the sender's memory cannot be mapped here ({first_line(error)}); CUDA IPC "
                        "needs both processes on one host, in one IPC namespace, with GPUs that reach each other"
                    ) from error

    def buffer(self, number: int, size: int) -> torch.Tensor:
        self._refuse_closed(f"message {number}")
        return self._buffers[number % OUTSTANDING][:size]

    def send(self, number: int, message: torch.Tensor, end: float, what: str) -> Pending:
        self._refuse_closed(what)
        torch.cuda.current_stream(self._device).synchronize()  # the readers are in other processes
        self._meeting.ask(lambda store: store.set(f"ready/{number}", ""), what)
        return Pending(number, what, None, message)

    def receive(self, number: int, size: int, end: float, what: str) -> Pending:
        return Pending(number, what, None, self.buffer(number, size))

    def wait(self, pending: Pending, end: float) -> torch.Tensor:
        is_through = self._is_taken if self._is_root else self._is_ready
        polled(lambda: self._closed.is_set() or is_through(pending), self._meeting, pending, end)
        self._refuse_closed(pending.what)
        return pending.message

    def release(self, pending: Pending) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._meeting.ask(lambda store: store.add(f"taken/{pending.number}", 1), pending.what)

    def close(self, why: str = "it left") -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._buffers, self._exports = [], []
            self._meeting.give_up(why)

    def _is_ready(self, pending: Pending) -> bool:
        return bool(self._meeting.ask(lambda store: store.check([f"ready/{pending.number}"]), pending.what))

    def _is_taken(self, pending: Pending) -> bool:
        ready, taken = f"ready/{pending.number}", f"taken/{pending.number}"
        if self._meeting.ask(lambda store: store.add(taken, 0), pending.what) < self._receivers:
            return False
        for key in (ready, taken):  # everybody is past it
            self._meeting.ask(lambda store, key=key: store.delete_key(key), pending.what)  # type: ignore[misc]
        return True

    def _refuse_closed(self, what: str) -> None:
        if self._closed.is_set():
            raise Unavailable(f"{self._meeting.name}: closed before {what} was through; make a new epoch")


def _exportable(size: int, device: torch.device) -> list[torch.Tensor]:
    """Buffers whose memory can be mapped elsewhere: expandable segments cannot, whatever the process is set to."""
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    expandable = bool(settings.get("expandable_segments"))
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    if expandable:
        change("expandable_segments:False")
    try:
        return [torch.empty(max(size, 1), dtype=torch.uint8, device=device) for _ in range(OUTSTANDING)]
    finally:
        if expandable:
            change("expandable_segments:True")


def _borrowed(buffer: torch.Tensor) -> torch.UntypedStorage:
    """A buffer's memory, owned by the buffer alone.

    torch keeps exported memory until its readers have counted down to 0: a reader that was killed never does, and two
    count below. So what torch exports owns nothing, and the root's buffers go when the root leaves.
    """
    storage: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(
        buffer.data_ptr(), buffer.device, buffer.numel()
    )
    return storage


def _exported(storage: torch.UntypedStorage) -> dict[str, Any]:
    """What another process needs to map it, as plain values."""
    _, handle, size, offset, counter, counter_offset, event, _ = storage._share_cuda_()
    return {
        "handle": handle.hex(),
        "bytes": size,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
    }


def _mapped(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The sender's buffer, in the address space of this process's own device, whichever GPU it is on."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        bytes.fromhex(handle["handle"]),
        handle["bytes"],
        handle["offset"],
        bytes.fromhex(handle["counter"]),
        handle["counter_offset"],
        bytes.fromhex(handle["event"]),
        False,  # the sender has waited for its device
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
