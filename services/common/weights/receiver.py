"""The engine's end of the pipe: whole tensors, put together from what every learner rank sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest

from services.common.errors import Conflict
from services.common.weights import manifest as cuts
from services.common.weights.digest import RunningDigest
from services.common.weights.store import connect_store
from services.common.weights.transport import Group, Pending, open_group

CPU = torch.device("cpu")


class Receiver:
    """Receiver rank `receiver_rank` in one membership epoch, connected to every sender rank.

    After any error the groups are broken: close it and join the next epoch. The process goes on.
    """

    def __init__(
        self,
        manifest: TransferManifest,
        receiver_rank: int,
        *,
        device: torch.device = CPU,
        left: threading.Event | None = None,
        deadline_seconds: float,
    ) -> None:
        """Connects to the group of each sender rank and warms it; blocks until everybody came, or `left` is set.

        Raises Unavailable when somebody did not come in time, InvalidRequest for a manifest the senders do not have.
        """
        cuts.validate(manifest)
        end = time.monotonic() + deadline_seconds
        self._device = device
        self._buckets = cuts.buckets(manifest)
        self._layouts = [[cuts.layout(b, rank) for rank in range(manifest.sender_ranks)] for b in self._buckets]
        self._store = connect_store(manifest.address, deadline_seconds)
        self._groups: list[Group] = []
        self._received = [0] * manifest.sender_ranks
        self._digest: int | None = None
        self.bytes = 0
        RunningDigest(device).warm()
        try:
            for rank in range(manifest.sender_ranks):
                group = open_group(
                    manifest, rank, 1 + receiver_rank, store=self._store, device=device, left=left, end=end
                )
                self._groups.append(group)
        except BaseException as error:
            self.close(str(error))
            raise

    @property
    def digest(self) -> int:
        """Digest of the whole tensors that were received last, computed from the bytes that arrived."""
        if self._digest is None:
            raise Conflict("no digest: no publication was received to its end")
        return self._digest

    @property
    def reuses_memory(self) -> bool:
        """Whether tensors are good only until the next bucket is asked for; else the consumer owns them."""
        return any(group.reuses_memory for group in self._groups)

    def receive(self, *, deadline_seconds: float) -> Iterator[list[tuple[TensorSpec, torch.Tensor]]]:
        """The whole tensors of one publication, a bucket at a time, in the order of the manifest, aliases left out.

        Tensors of one bucket may share their storage. One bucket is being received while another is handed out. Work
        that the consumer gives to the device belongs on the stream that was current when it asked for the bucket.
        `digest` is there at the end, when the device is done with all of it.
        Raises Expired at the deadline, Unavailable when a peer went away.
        """
        self._digest = None
        self.bytes = 0
        digest = RunningDigest(self._device)
        end = time.monotonic() + deadline_seconds
        count = len(self._buckets)
        try:
            ahead = self._post(0, end) if count else {}
            for number in range(count):
                pending, ahead = ahead, self._post(number + 1, end) if number + 1 < count else {}
                messages = {rank: self._groups[rank].wait(message, end) for rank, message in pending.items()}
                bucket = self._assembled(number, messages)
                for spec, tensor in bucket:
                    digest.add(spec.name, tensor.view(-1), 0)
                    self.bytes += cuts.tensor_bytes(spec)
                yield bucket
                for rank, message in pending.items():
                    self._groups[rank].release(message)
        except BaseException as error:
            self.close("a receiver stopped taking" if isinstance(error, GeneratorExit) else str(error) or repr(error))
            raise
        self._digest = digest.value()

    def close(self, why: str = "a receiver left") -> None:
        """Leaves the groups. May be called twice, and from another thread to end a receive under way."""
        # At the same time: a group that is torn may take seconds.
        closing = [threading.Thread(target=group.close, args=(why,), daemon=True) for group in self._groups]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _post(self, bucket: int, end: float) -> dict[int, Pending]:
        """By sender rank; none for one that has nothing of this bucket."""
        posted: dict[int, Pending] = {}
        for rank, group in enumerate(self._groups):
            _, size = self._layouts[bucket][rank]
            if size:
                what = f"bucket {bucket} of {len(self._buckets)} from learner rank {rank}"
                posted[rank] = group.receive(self._received[rank], size, end, what)
                self._received[rank] += 1
        return posted

    def _assembled(self, bucket: int, messages: dict[int, torch.Tensor]) -> list[tuple[TensorSpec, torch.Tensor]]:
        parts: dict[str, list[torch.Tensor]] = {spec.name: [] for spec in self._buckets[bucket]}
        for rank, message in sorted(messages.items()):  # rank order is the order of the slices
            for placement in self._layouts[bucket][rank][0]:
                parts[placement.spec.name].append(cuts.view(message, placement))
        assembled: list[tuple[TensorSpec, torch.Tensor]] = []
        for spec in self._buckets[bucket]:
            slices = parts[spec.name]
            if len(slices) == 1:
                whole = slices[0]
            elif slices:
                whole = torch.cat(slices)
            else:
                whole = torch.empty(0, dtype=cuts.ELEMENT_TYPES[spec.element_type], device=self._device)
            assembled.append((spec, whole.view(tuple(spec.shape))))
        return assembled
