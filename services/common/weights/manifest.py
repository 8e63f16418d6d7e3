"""How the tensors of a manifest are cut into slices and buckets: the same arithmetic on both ends.

A bucket is a run of consecutive tensors. Each sender rank sends one message per bucket: its own slices of those
tensors, one after the other, each beginning at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from antiphon.types.v1 import transfer_pb2
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest

from services.common.errors import InvalidRequest

ELEMENT_TYPES: dict[transfer_pb2.ElementType, torch.dtype] = {
    transfer_pb2.ELEMENT_TYPE_FLOAT32: torch.float32,
    transfer_pb2.ELEMENT_TYPE_BFLOAT16: torch.bfloat16,
    transfer_pb2.ELEMENT_TYPE_FLOAT16: torch.float16,
}
"""Element type on the wire -> torch dtype."""

TRANSPORTS = (
    transfer_pb2.TRANSPORT_GLOO,
    transfer_pb2.TRANSPORT_NCCL,
    transfer_pb2.TRANSPORT_CUDA_IPC,
)

MOST_RANKS = 4096
"""Of each side: what is kept for each of them must fit into memory whatever a peer says."""

ALIGNMENT = 16  # bytes; a slice can then be viewed as any element type


def element_type(dtype: torch.dtype) -> transfer_pb2.ElementType:
    """The wire name of a dtype. Raises InvalidRequest for one that is not sent."""
    for name, known in ELEMENT_TYPES.items():
        if known == dtype:
            return name
    raise InvalidRequest(f"weights of {dtype} cannot be sent; expected one of {list(ELEMENT_TYPES.values())}")


def numel(spec: TensorSpec) -> int:
    """Elements of the whole tensor."""
    return math.prod(spec.shape)


def item_bytes(spec: TensorSpec) -> int:
    return int(ELEMENT_TYPES[spec.element_type].itemsize)


def tensor_bytes(spec: TensorSpec) -> int:
    return numel(spec) * item_bytes(spec)


def slice_range(spec: TensorSpec, rank: int) -> tuple[int, int]:
    """[start, stop) of what sender `rank` holds of the flattened tensor, in elements; may be empty."""
    start = sum(spec.slice_numel[:rank])
    return start, start + spec.slice_numel[rank]


def sent(manifest: TransferManifest) -> list[TensorSpec]:
    """The tensors that travel, in order: all but the aliases."""
    return [spec for spec in manifest.tensors if not spec.alias_of]


def buckets(manifest: TransferManifest) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `bucket_bytes` together; one larger than that is a bucket of its own."""
    result: list[list[TensorSpec]] = []
    room = 0
    for spec in sent(manifest):
        size = tensor_bytes(spec)
        if not result or size > room:
            result.append([])
            room = manifest.bucket_bytes
        result[-1].append(spec)
        room -= size
    return result


@dataclass(frozen=True)
class Placement:
    """Where one slice lies in its sender's message for a bucket."""

    spec: TensorSpec
    start: int
    """First element of the slice in the whole tensor."""
    stop: int
    offset: int
    """First byte in the message."""

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * item_bytes(self.spec)


def layout(bucket: Sequence[TensorSpec], rank: int) -> tuple[list[Placement], int]:
    """The slices of one sender's message for a bucket, empty ones left out, and its size in bytes (0: none is sent)."""
    placements: list[Placement] = []
    end = 0
    for spec in bucket:
        start, stop = slice_range(spec, rank)
        if start == stop:
            continue
        placement = Placement(spec, start, stop, -(-end // ALIGNMENT) * ALIGNMENT)
        placements.append(placement)
        end = placement.offset + placement.bytes
    return placements, end


def view(message: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The slice inside a message (1-D uint8), as 1-D elements of its own type."""
    part = message[placement.offset : placement.offset + placement.bytes]
    return part.view(ELEMENT_TYPES[placement.spec.element_type])


def fingerprint(manifest: TransferManifest) -> bytes:
    """16 bytes that are equal on two ends that hold the same manifest."""
    return hashlib.sha256(manifest.SerializeToString(deterministic=True)).digest()[:16]


def validate(manifest: TransferManifest) -> None:
    """Raises InvalidRequest that lists everything wrong with a manifest."""
    problems: list[str] = []
    if manifest.transport not in TRANSPORTS:
        problems.append(f"transport {manifest.transport} is not known; expected one of {TRANSPORTS}")
    for field in ("sender_ranks", "receiver_ranks", "bucket_bytes"):
        if getattr(manifest, field) < 1:
            problems.append(f"{field} must be at least 1, it is {getattr(manifest, field)}")
    for field in ("sender_ranks", "receiver_ranks"):
        if getattr(manifest, field) > MOST_RANKS:
            problems.append(f"{field} must be at most {MOST_RANKS}, it is {getattr(manifest, field)}")
    host, _, port = manifest.address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        problems.append(f"address must be host:port, it is {manifest.address[:300]!r}")
    names: set[str] = set()
    for spec in manifest.tensors:
        if spec.name in names:
            problems.append(f"{spec.name}: named twice")
        names.add(spec.name)
    own = {spec.name for spec in sent(manifest)}
    for spec in manifest.tensors:
        problems.extend(f"{spec.name}: {problem}" for problem in _problems(spec, manifest.sender_ranks, own))
    if problems:
        raise InvalidRequest(f"manifest of epoch {manifest.epoch}: " + "; ".join(problems))


def _problems(spec: TensorSpec, sender_ranks: int, own: set[str]) -> list[str]:
    problems: list[str] = []
    if spec.element_type not in ELEMENT_TYPES:
        problems.append(f"element type {spec.element_type} is not known")
    if spec.alias_of:
        if spec.alias_of not in own:
            problems.append(f"alias of {spec.alias_of!r}, which is not another tensor of the manifest that is sent")
        return problems
    if len(spec.slice_numel) != sender_ranks:
        problems.append(f"{len(spec.slice_numel)} slices for {sender_ranks} sender ranks")
    if any(count < 0 for count in spec.slice_numel) or sum(spec.slice_numel) != numel(spec):
        problems.append(f"slices of {list(spec.slice_numel)} elements do not make up shape {list(spec.shape)}")
    return problems
