"""A transfer group over NCCL: weights from GPU to GPU. NCCL refuses two ranks of a group on one GPU: see cuda_ipc.py.

Built with NCCL's own error handling off, which would end the process of everybody who waits for a dead peer. Waits poll
to their deadline; then the group is aborted, which ends its kernels, and the process goes on (six of six aborts in an
engine that generated afterwards: benchmarks/spikes/gpu_seams).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupNCCL

from services.common.errors import AntiphonError, Unavailable
from services.common.weights.store import Meeting
from services.common.weights.transport import OUTSTANDING, ROOT, Pending, first_line, late, polled

NEVER = timedelta(days=1)
"""For NCCL's own watchdog: the deadlines are ours."""
ABORT_SECONDS = 10.0


class NcclGroup:
    """See services/common/weights/transport.py. Holds OUTSTANDING buffers of the largest message on its device."""

    reuses_memory = True

    def __init__(
        self, meeting: Meeting, rank: int, size: int, *, device: torch.device, largest: int, end: float
    ) -> None:
        """Connects all members, who have all come, and sends one message of the largest size: the first is slow."""
        self._meeting = meeting
        self._device = device
        with torch.cuda.device(device):
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(OUTSTANDING)]
            with _without_error_handling():
                options = ProcessGroupNCCL.Options()
                options._timeout = NEVER
                self._group: ProcessGroupNCCL | None = ProcessGroupNCCL(
                    PrefixStore("nccl", meeting.store), rank, size, options
                )
        # The first broadcast makes the communicator, and blocks until every peer does so, however long that takes.
        pending: list[Pending | AntiphonError | RuntimeError] = []

        def connect() -> None:
            try:
                pending.append(self._broadcast(-1, self._buffers[0], "the first message"))
            except (AntiphonError, RuntimeError) as error:
                pending.append(error)

        thread = threading.Thread(target=connect, name=meeting.name, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                if time.monotonic() >= end:
                    raise late(meeting.name, "connecting")
                meeting.check("connecting")
                thread.join(0.001)
            connected = pending[0]
            if not isinstance(connected, Pending):
                raise connected
            self.wait(connected, end)
        except BaseException as error:
            self.close(first_line(error))
            raise

    def buffer(self, number: int, size: int) -> torch.Tensor:
        return self._buffers[number % OUTSTANDING][:size]

    def send(self, number: int, message: torch.Tensor, end: float, what: str) -> Pending:
        return self._broadcast(number, message, what)

    def receive(self, number: int, size: int, end: float, what: str) -> Pending:
        # NCCL's stream waits for what this thread's stream was given so far: for those who still read the buffer.
        return self._broadcast(number, self._buffers[number % OUTSTANDING][:size], what)

    def wait(self, pending: Pending, end: float) -> torch.Tensor:
        # torch counts a message that failed as completed, and answers neither `exception` nor `is_success` for NCCL any
        # more: what arrived is judged by its digest.
        polled(lambda: self._group is None or self._is_over(pending), self._meeting, pending, end)
        if self._group is None:
            raise Unavailable(f"{self._meeting.name}: closed while {pending.what} was under way")
        return pending.message

    def release(self, pending: Pending) -> None:
        pass

    def close(self, why: str = "it left") -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self._meeting.give_up(why)
        aborting = threading.Thread(target=group.abort, name=f"abort of {self._meeting.name}", daemon=True)
        aborting.start()
        aborting.join(ABORT_SECONDS)

    def _broadcast(self, number: int, message: torch.Tensor, what: str) -> Pending:
        group = self._group
        if group is None:
            raise Unavailable(f"{self._meeting.name}: closed before {what}; make a new epoch")
        options = BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.asyncOp = True
        try:
            with torch.cuda.device(self._device):
                return Pending(number, what, group.broadcast([message], options), message)
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def _is_over(self, pending: Pending) -> bool:
        assert pending.work is not None
        try:
            return bool(pending.work.is_completed())
        except RuntimeError as error:
            raise self._failed(pending.what, error) from error

    def _failed(self, what: str, error: RuntimeError) -> Unavailable:
        """NCCL sees some deaths of peers by itself."""
        return Unavailable(f"{self._meeting.name}: {what} failed in NCCL ({first_line(error)}); make a new epoch")


@contextmanager
def _without_error_handling() -> Iterator[None]:
    """The variables that torch reads when a group is made, for this one only: the process has other groups."""
    wanted = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would ask the learner's store every second, also when that is gone
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
