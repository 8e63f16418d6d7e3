"""The copies that loading a set of tensors into a vLLM model comes to, found once and made again for each publication.

`load_weights` walks over the whole model and matches names for every call; between two GPUs that takes longer than the
weights travel. So it is called once with tensors that have no memory, and what it would have copied where is noted. A
loader that does anything else with them (casts, arithmetic) is not one whose copies can be noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.weights.manifest import ELEMENT_TYPES


class NotPlain(Exception):
    """The loader does more than copy."""


@dataclass(frozen=True)
class _Copy:
    """A part of a tensor that arrives, as a view of it, and where it goes."""

    into: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class NotedCopies:
    """What `load_weights` does with each tensor."""

    def __init__(self, model: Any, tensors: Sequence[tuple[TensorSpec, Sequence[str]]]) -> None:
        """`tensors`: each tensor that travels, and the names under which the model takes it. Leaves the model alone.

        Raises NotPlain.
        """
        self._copies: dict[str, list[_Copy]] = {spec.name: [] for spec, _ in tensors}
        self._fills: list[tuple[torch.Tensor, float]] = []
        arriving: list[tuple[str, torch.Tensor]] = []
        owners: dict[int, str] = {}
        for spec, names in tensors:
            for name in names:
                without_memory = torch.empty(
                    tuple(spec.shape), dtype=ELEMENT_TYPES[spec.element_type], device=torch.device("meta")
                )
                owners[without_memory.untyped_storage()._cdata] = spec.name
                arriving.append((name, without_memory))
        with torch.no_grad(), _Noting(owners, self._copies, self._fills):
            loaded = model.load_weights(arriving)
        self.loaded = set(loaded)
        """Names of the parameters, as the model says."""
        lost = [name for name, copies in self._copies.items() if not copies]
        if lost:
            raise NotPlain(f"{lost[0]} is copied nowhere")

    def make(self, arrived: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Gives the device the copies of these tensors, which are contiguous."""
        for spec, tensor in arrived:
            for copy in self._copies[spec.name]:
                copy.into.copy_(tensor.as_strided(copy.size, copy.stride, tensor.storage_offset() + copy.offset))

    def fill(self) -> None:
        """What the loader fills with a number: rows that pad a vocabulary."""
        for tensor, value in self._fills:
            tensor.fill_(value)


class _Noting(TorchDispatchMode):
    def __init__(
        self, owners: Mapping[int, str], copies: dict[str, list[_Copy]], fills: list[tuple[torch.Tensor, float]]
    ) -> None:
        super().__init__()
        self._owners = owners
        self._copies = copies
        self._fills = fills

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or target.device.type == "meta" or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            owner = self._owners.get(source.untyped_storage()._cdata) if source.device.type == "meta" else None
            if owner is None or source.shape != target.shape or source.dtype != target.dtype:
                raise NotPlain(f"something made of the tensors goes into a parameter of shape {list(target.shape)}")
            self._copies[owner].append(
                _Copy(target, tuple(source.shape), tuple(source.stride()), source.storage_offset())
            )
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            if target.numel():
                self._fills.append((target, float(args[1]) if len(args) > 1 else 0.0))
        else:
            raise NotPlain(f"{func} on a parameter of shape {list(target.shape)}")
        return target
