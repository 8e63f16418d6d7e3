"""The engine's end of the pipe: whole tensors, put together from what every learner rank sent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest

from services.common.errors import Conflict
from services.common.weights import manifest as cuts
from services.common.weights.digest import add_digests, tensor_digest
from services.common.weights.gloo import GlooGroup, Pending
from services.common.weights.store import connect_store


class Receiver:
    """Receiver rank `receiver_rank` in one membership epoch, connected to every sender rank.

    After any error the groups are broken: close it and join the next epoch. The process goes on.
    """

    def __init__(self, manifest: TransferManifest, receiver_rank: int, *, deadline_seconds: float) -> None:
        """Connects to the group of each sender rank and warms it; blocks until everybody came.

        Raises Unavailable when somebody did not come in time, InvalidRequest for a manifest the senders do not have.
        """
        cuts.validate(manifest)
        tensor_digest("", torch.zeros(1), 0)  # the kernel is loaded now, not during the first publication
        end = time.monotonic() + deadline_seconds
        self._manifest = manifest
        self._buckets = cuts.buckets(manifest)
        self._store = connect_store(manifest.address, deadline_seconds)
        self._groups: list[GlooGroup] = []
        self._digest: int | None = None
        self.bytes = 0
        try:
            for rank in range(manifest.sender_ranks):
                group = GlooGroup(
                    self._store,
                    address=manifest.address,
                    prefix=f"{manifest.epoch}/{rank}",
                    rank=1 + receiver_rank,
                    receiver_ranks=manifest.receiver_ranks,
                    greeting=cuts.fingerprint(manifest),
                    deadline_seconds=max(end - time.monotonic(), 0.001),
                )
                self._groups.append(group)
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> int:
        """Digest of the whole tensors that were received last, computed from the bytes that arrived."""
        if self._digest is None:
            raise Conflict("no digest: no publication was received to its end")
        return self._digest

    def receive(self, *, deadline_seconds: float) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The whole tensors of one publication in the order of the manifest, aliases left out.

        The consumer owns them; tensors of one bucket may share their storage. One bucket is being received while
        another is handed out. `digest` is there at the end.
        Raises Expired at the deadline, Unavailable when a peer went away.
        """
        self._digest = None
        self.bytes = 0
        digest = 0
        end = time.monotonic() + deadline_seconds
        ahead: list[tuple[int, Pending]] = []
        try:
            if self._buckets:
                ahead = self._post(0, end)
            for number, bucket in enumerate(self._buckets):
                messages = {rank: self._groups[rank].wait(pending, end) for rank, pending in ahead}
                ahead = self._post(number + 1, end) if number + 1 < len(self._buckets) else []
                for spec, tensor in self._assembled(bucket, messages):
                    digest = add_digests(digest, tensor_digest(spec.name, tensor.view(-1), 0))
                    self.bytes += cuts.tensor_bytes(spec)
                    yield spec, tensor
        except BaseException:
            self.close()
            raise
        self._digest = digest

    def close(self) -> None:
        """Leaves the groups. May be called twice, and from another thread to end a receive under way."""
        for group in self._groups:
            group.close()

    def _post(self, number: int, end: float) -> list[tuple[int, Pending]]:
        posted: list[tuple[int, Pending]] = []
        for rank, group in enumerate(self._groups):
            _, size = cuts.layout(self._buckets[number], rank)
            if size:
                message = torch.empty(size, dtype=torch.uint8)
                what = f"bucket {number} of {len(self._buckets)} from learner rank {rank}"
                posted.append((rank, group.broadcast(message, end, what)))
        return posted

    def _assembled(
        self, bucket: list[TensorSpec], messages: dict[int, torch.Tensor]
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        parts: dict[str, list[torch.Tensor]] = {spec.name: [] for spec in bucket}
        for rank, message in sorted(messages.items()):  # rank order is the order of the slices
            for placement in cuts.layout(bucket, rank)[0]:
                parts[placement.spec.name].append(cuts.view(message, placement))
        for spec in bucket:
            slices = parts[spec.name]
            if len(slices) == 1:
                whole = slices[0]
            elif slices:
                whole = torch.cat(slices)
            else:
                whole = torch.empty(0, dtype=cuts.ELEMENT_TYPES[spec.element_type])
            yield spec, whole.view(tuple(spec.shape))
