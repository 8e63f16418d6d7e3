"""The learner's end of the pipe: each rank sends the flat slices it holds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest
from torch.distributed import Store

from services.common.weights import manifest as cuts
from services.common.weights.digest import RunningDigest
from services.common.weights.store import connect_store
from services.common.weights.transport import OUTSTANDING, ROOT, Pending, open_group

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SendReport:
    """What one rank sent."""

    digest: int
    """Of this rank's slices; the policy's digest is the sum over the ranks."""
    bytes: int
    seconds: float


class Sender:
    """Rank `rank` of the learner in one membership epoch, connected to every receiver.

    After any error the group is broken: close it and make a new epoch. The process goes on.
    """

    def __init__(
        self,
        manifest: TransferManifest,
        rank: int,
        *,
        device: torch.device = CPU,
        store: Store | None = None,
        left: threading.Event | None = None,
        deadline_seconds: float,
    ) -> None:
        """Connects and warms; blocks until every receiver came, or `left` is set.

        Rank 0 passes the store it bound, the others none.

        `device` is where the slices are. Raises Unavailable when somebody did not come in time.
        """
        cuts.validate(manifest)
        end = time.monotonic() + deadline_seconds
        if store is None:
            store = connect_store(manifest.address, deadline_seconds)
        self._rank = rank
        self._device = device
        self._store = store  # rank 0's is the server: it must live as long as the group
        self._buckets = [cuts.layout(bucket, rank) for bucket in cuts.buckets(manifest)]
        self._sent = 0
        RunningDigest(device).warm()
        self._group = open_group(manifest, rank, ROOT, store=store, device=device, left=left, end=end)

    def send(
        self,
        slice_of: Callable[[TensorSpec], torch.Tensor],
        *,
        deadline_seconds: float,
        on_bucket: Callable[[int, int], None] | None = None,
    ) -> SendReport:
        """Sends every bucket once. All ranks and all receivers take part.

        `slice_of(spec)` answers this rank's slice: 1-D, contiguous, in the wire dtype, `slice_numel[rank]` elements; it
        is not called where that is 0. `on_bucket(done, of)` hears of each bucket that is through.
        Raises Expired at the deadline, Unavailable when a receiver went away, ValueError for a slice that does not fit;
        after any of them the receivers fail at once, too.
        """
        begin = time.monotonic()
        end = begin + deadline_seconds
        digest = RunningDigest(self._device)
        total = 0
        under_way: deque[Pending | None] = deque()
        count = len(self._buckets)
        done = 0

        def through() -> None:
            nonlocal done
            pending = under_way.popleft()
            if pending is not None:
                self._group.wait(pending, end)
            done += 1
            if on_bucket is not None:
                on_bucket(done, count)

        try:
            for number, (placements, size) in enumerate(self._buckets):
                if len(under_way) == OUTSTANDING:  # the buffer of the one before the last is free then
                    through()
                slices = [(placement, self._checked(placement, slice_of)) for placement in placements]
                pending = None
                if size:
                    message = self._group.buffer(self._sent, size)
                    for placement, flat in slices:
                        cuts.view(message, placement).copy_(flat)
                    pending = self._group.send(self._sent, message, end, f"bucket {number} of {count}")
                    self._sent += 1
                under_way.append(pending)
                # While that one travels:
                for placement, flat in slices:
                    digest.add(placement.spec.name, flat, placement.start)
                    total += placement.bytes
            while under_way:
                through()
        except BaseException as error:
            self.close(str(error))
            raise
        return SendReport(digest.value(), total, time.monotonic() - begin)

    def close(self, why: str = "the learner's rank left") -> None:
        """Leaves the group. May be called twice, and from another thread to end a send under way."""
        self._group.close(why)

    def _checked(self, placement: cuts.Placement, slice_of: Callable[[TensorSpec], torch.Tensor]) -> torch.Tensor:
        flat = slice_of(placement.spec).detach()
        dtype = cuts.ELEMENT_TYPES[placement.spec.element_type]
        if flat.dtype != dtype or flat.shape != (placement.stop - placement.start,) or not flat.is_contiguous():
            raise ValueError(
                f"{placement.spec.name}: rank {self._rank} must send {placement.stop - placement.start} contiguous "
                f"elements of {dtype}, got shape {tuple(flat.shape)} of {flat.dtype}"
            )
        return flat
