"""The learner's end of the pipe: each rank sends the flat slices it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest
from torch.distributed import Store

from services.common.weights import manifest as cuts
from services.common.weights.digest import add_digests, tensor_digest
from services.common.weights.gloo import ROOT, GlooGroup, Pending
from services.common.weights.store import connect_store


@dataclass(frozen=True)
class SendReport:
    """What one rank sent."""

    digest: int
    """Of this rank's slices; the policy's digest is the sum over the ranks (`add_digests`)."""
    bytes: int
    seconds: float


class Sender:
    """Rank `rank` of the learner in one membership epoch, connected to every receiver.

    After any error the group is broken: close it and make a new epoch. The process goes on.
    """

    def __init__(
        self, manifest: TransferManifest, rank: int, *, store: Store | None = None, deadline_seconds: float
    ) -> None:
        """Connects and warms; blocks until every receiver came. Rank 0 passes the store it bound, the others none.

        Raises Unavailable when somebody did not come in time.
        """
        cuts.validate(manifest)
        tensor_digest("", torch.zeros(1), 0)  # the kernel is loaded now, not during the first publication
        end = time.monotonic() + deadline_seconds
        if store is None:
            store = connect_store(manifest.address, deadline_seconds)
        self._manifest = manifest
        self._rank = rank
        self._store = store  # rank 0's is the server: it must live as long as the group
        self._buckets = [cuts.layout(bucket, rank) for bucket in cuts.buckets(manifest)]
        self._group = GlooGroup(
            store,
            address=manifest.address,
            prefix=f"{manifest.epoch}/{rank}",
            rank=ROOT,
            receiver_ranks=manifest.receiver_ranks,
            greeting=cuts.fingerprint(manifest),
            deadline_seconds=max(end - time.monotonic(), 0.001),
        )
        largest = max((size for _, size in self._buckets), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

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
        digest = 0
        total = 0
        pending: Pending | None = None
        count = len(self._buckets)
        try:
            for number, (placements, size) in enumerate(self._buckets):
                message = self._buffers[number % 2][:size]
                slices = [(placement, self._checked(placement, slice_of)) for placement in placements]
                for placement, flat in slices:
                    cuts.view(message, placement).copy_(flat)
                # At most one message is on its way while the next is filled.
                if number > 0:
                    self._through(pending, end, number, on_bucket)
                pending = self._group.broadcast(message, end, f"bucket {number} of {count}") if size else None
                # While that one travels:
                for placement, flat in slices:
                    digest = add_digests(digest, tensor_digest(placement.spec.name, flat, placement.start))
                    total += placement.bytes
            if count:
                self._through(pending, end, count, on_bucket)
        except BaseException:
            self.close()
            raise
        return SendReport(digest, total, time.monotonic() - begin)

    def close(self) -> None:
        """Leaves the group. May be called twice, and from another thread to end a send under way."""
        self._group.close()

    def _through(
        self, pending: Pending | None, end: float, done: int, on_bucket: Callable[[int, int], None] | None
    ) -> None:
        if pending is not None:
            self._group.wait(pending, end)
        if on_bucket is not None:
            on_bucket(done, len(self._buckets))

    def _checked(self, placement: cuts.Placement, slice_of: Callable[[TensorSpec], torch.Tensor]) -> torch.Tensor:
        flat = slice_of(placement.spec).detach()
        dtype = cuts.ELEMENT_TYPES[placement.spec.element_type]
        if flat.dtype != dtype or flat.shape != (placement.stop - placement.start,) or not flat.is_contiguous():
            raise ValueError(
                f"{placement.spec.name}: rank {self._rank} must send {placement.stop - placement.start} contiguous "
                f"elements of {dtype}, got shape {tuple(flat.shape)} of {flat.dtype}"
            )
        return flat
