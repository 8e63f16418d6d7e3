"""What a learner's rank sends: the manifest of the model, the slices this rank holds, and the probe."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import transfer_pb2
from torch.distributed import Store

from services.common.errors import Conflict, InvalidRequest
from services.common.weights.manifest import element_type
from services.common.weights.sender import Sender, SendReport
from services.common.weights.store import bind_store

TRANSPORTS_OF = {
    "cpu": (transfer_pb2.TRANSPORT_GLOO,),
    "cuda": (transfer_pb2.TRANSPORT_NCCL, transfer_pb2.TRANSPORT_CUDA_IPC),
}
PROBE_TOKENS = 32
PROBE_SEED = 0x616E7469


class WeightTransfer:
    """One rank's end of the transfer group of the newest epoch. `connect` runs beside the rank's other work."""

    def __init__(self, model: Any, rank: int, ranks: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._rank = rank
        self._ranks = ranks
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._store: Store | None = None
        self._sender: Sender | None = None
        self._left = threading.Event()
        """Set when the group that is being made, or is there, is to be left."""

    def join(self, request: learner_pb2.JoinTransferRequest, host: str) -> transfer_pb2.TransferManifest | None:
        """Leaves the older group. Rank 0 binds the store of the new epoch and answers with the manifest.

        Raises InvalidRequest in every rank for a transport that does not carry what is on this device.
        """
        possible = TRANSPORTS_OF[self._device.type]
        if request.transport not in possible:
            names = " or ".join(transfer_pb2.Transport.Name(transport) for transport in possible)
            raise InvalidRequest(
                f"epoch {request.epoch}: this learner's weights are on {self._device.type}; expected {names}, got "
                f"{transfer_pb2.Transport.Name(request.transport)}"
            )
        with self._lock:
            self._leave()
            self._left = threading.Event()
            self._epoch = request.epoch
            if self._rank != 0:
                return None
            self._store, address = bind_store(host)
        return transfer_pb2.TransferManifest(
            epoch=request.epoch,
            address=address,
            transport=request.transport,
            sender_ranks=self._ranks,
            receiver_ranks=request.receiver_ranks,
            bucket_bytes=request.bucket_bytes,
            tensors=tensor_specs(self._model, self._ranks),
        )

    def connect(self, manifest: transfer_pb2.TransferManifest, deadline_seconds: float) -> None:
        """Blocks until every receiver came. Raises Unavailable when one did not, Conflict when a newer epoch began."""
        with self._lock:
            self._check(manifest.epoch)
            store, left = self._store, self._left
        sender = Sender(
            manifest, self._rank, device=self._device, store=store, left=left, deadline_seconds=deadline_seconds
        )
        with self._lock:
            if self._epoch != manifest.epoch:
                sender.close()
            self._check(manifest.epoch)
            self._sender = sender

    def send(self, epoch: int, deadline_seconds: float, on_bucket: Callable[[int, int], None]) -> SendReport:
        """Sends this rank's slices of every tensor. After an error the group is broken: `leave` it."""
        with self._lock:
            self._check(epoch)
            sender = self._sender
        if sender is None:
            raise Conflict(f"epoch {epoch}: rank {self._rank} is not connected; make a new epoch")
        parameters = dict(self._model.named_parameters())

        def slice_of(spec: transfer_pb2.TensorSpec) -> torch.Tensor:
            held: torch.Tensor = parameters[spec.name].ds_tensor  # padded at the end of the last rank's part
            return held.detach().narrow(0, 0, spec.slice_numel[self._rank])

        return sender.send(slice_of, deadline_seconds=deadline_seconds, on_bucket=on_bucket)

    def leave(self) -> None:
        """Breaks the connections of the group there is, and of one that is being made."""
        with self._lock:
            self._leave()
            self._epoch = None

    def _check(self, epoch: int) -> None:
        if self._epoch != epoch:
            now = "in none" if self._epoch is None else f"in epoch {self._epoch}"
            raise Conflict(f"epoch {epoch} is over: rank {self._rank} is {now}; make a new one")

    def _leave(self) -> None:
        self._left.set()
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._store = None


def tensor_specs(model: Any, ranks: int) -> list[transfer_pb2.TensorSpec]:
    """Every parameter of a ZeRO-3 model by its Hugging Face name, in the model's order. An alias names the first one.

    ZeRO-3 gives each rank ceil(n / ranks) elements of the flattened tensor, the last ones what is left (`ds_numel` says
    how many there are in truth); what each rank holds beyond that is padding.
    """
    specs: list[transfer_pb2.TensorSpec] = []
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        spec = transfer_pb2.TensorSpec(
            name=name, shape=parameter.ds_shape, element_type=element_type(parameter.ds_tensor.dtype)
        )
        known = first_names.setdefault(id(parameter), name)
        if known != name:
            spec.alias_of = known
        else:
            spec.slice_numel.extend(slice_sizes(parameter.ds_numel, parameter.ds_tensor.numel(), ranks))
        specs.append(spec)
    return specs


def slice_sizes(numel: int, held_by_each: int, ranks: int) -> list[int]:
    """How many of `numel` elements each rank holds when each has room for `held_by_each`, filled in rank order."""
    sizes = [min(held_by_each, max(0, numel - rank * held_by_each)) for rank in range(ranks)]
    if sum(sizes) != numel:
        raise ValueError(f"{ranks} ranks with {held_by_each} elements each do not hold {numel}")
    return sizes


def probe_token_ids(vocabulary: int, special_ids: Sequence[int]) -> list[int]:
    """The fixed pseudo-random tokens whose log-probs both ends compare: inside the vocabulary, none of them special."""
    special = set(special_ids)
    allowed = [token for token in range(vocabulary) if token not in special]
    generator = random.Random(PROBE_SEED)
    return [generator.choice(allowed) for _ in range(PROBE_TOKENS)]
