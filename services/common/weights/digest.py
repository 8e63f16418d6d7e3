"""The digest of weights that docs/design.md §6 defines: additive over slices, so it is computed where the bytes are.

For a tensor called `name` whose elements, in the wire dtype, are the words w_0, w_1, … (the bits of each element as an
unsigned integer: 16 bits for bfloat16 and float16, 32 bits for float32), in the order of the flattened tensor:

    digest = Σ_i  w_i · mix64(fnv64(name) XOR i)      mod 2^64
    fnv64  = FNV-1a over the UTF-8 bytes: h = 0xcbf29ce484222325; for each byte: h = (h XOR byte) · 0x100000001b3
    mix64  = the finaliser of splitmix64:
             z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
             (shifts are logical, all arithmetic is mod 2^64)

The digest of a policy is the sum over its tensors, aliases left out. A tensor of zeros adds nothing: whoever checks a
digest also checks the set of names.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

_MASK = (1 << 64) - 1
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Elements per piece of work: temporaries of the torch path stay under 100 MiB, and threads get even shares.
_PIECE = 1 << 21


def fnv64(name: str) -> int:
    """FNV-1a, 64 bits."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


def tensor_digest(name: str, slice_flat: torch.Tensor, start: int) -> int:
    """Digest of the slice of tensor `name` that begins at element `start`; 0 <= result < 2^64.

    `slice_flat`: 1-D, contiguous, in the wire dtype (2 or 4 bytes an element), on any device.
    """
    _check(name, slice_flat)
    if slice_flat.numel() == 0:
        return 0
    if slice_flat.device.type == "cpu":
        return _digest_on_cpu(fnv64(name), slice_flat.detach(), start)
    running = RunningDigest(slice_flat.device)
    running.add(name, slice_flat, start)
    return running.value()


class RunningDigest:
    """Sums the digests of slices as they come. On a GPU without waiting for it: only `value` does."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type != "cpu"
        self._total = 0
        self._sum = torch.zeros(1, dtype=torch.int64, device=device) if self._on_gpu else None

    def add(self, name: str, slice_flat: torch.Tensor, start: int) -> None:
        """Adds the slice of tensor `name` that begins at element `start`; see `tensor_digest`."""
        if self._sum is None:
            self._total = add_digests(self._total, tensor_digest(name, slice_flat, start))
            return
        _check(name, slice_flat)
        if slice_flat.numel() == 0:
            return
        from services.common.weights.digest_cuda import add_to

        add_to(self._sum, _as_int64(fnv64(name)), slice_flat.detach(), start)

    def value(self) -> int:
        """0 <= result < 2^64."""
        return self._total if self._sum is None else int(self._sum.item()) & _MASK

    def warm(self) -> None:
        """Loads the kernels, so that the first publication does not wait for a compiler."""
        device = torch.device("cpu") if self._sum is None else self._sum.device
        for dtype in (torch.float32, torch.bfloat16):
            self.add("", torch.zeros(1, dtype=dtype, device=device), 0)
        self.value()


def add_digests(*digests: int) -> int:
    """The digest of all the parts together."""
    return sum(digests) & _MASK


def digest_with_torch(name: str, slice_flat: torch.Tensor, start: int) -> int:
    """The same by torch's own operations, on the tensor's device."""
    words = slice_flat.detach().view(torch.int16 if slice_flat.element_size() == 2 else torch.int32)
    word_mask = (1 << (8 * slice_flat.element_size())) - 1
    hashed = _as_int64(fnv64(name))
    total = 0
    for begin in range(0, words.numel(), _PIECE):
        piece = words[begin : begin + _PIECE].to(torch.int64) & word_mask
        z = torch.arange(start + begin, start + begin + piece.numel(), dtype=torch.int64, device=words.device)
        z ^= hashed
        z ^= _shifted_right(z, 30)
        z *= _as_int64(_MIX_1)
        z ^= _shifted_right(z, 27)
        z *= _as_int64(_MIX_2)
        z ^= _shifted_right(z, 31)
        z *= piece
        total += int(z.sum().item())  # int64 sums wrap around
    return total & _MASK


def _check(name: str, slice_flat: torch.Tensor) -> None:
    if slice_flat.dim() != 1 or not slice_flat.is_contiguous() or slice_flat.element_size() not in (2, 4):
        raise ValueError(
            f"{name}: expected a flat contiguous slice of 2- or 4-byte elements, "
            f"got shape {tuple(slice_flat.shape)}, strides {slice_flat.stride()}, {slice_flat.dtype}"
        )


def _shifted_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _digest_on_cpu(hashed: int, slice_flat: torch.Tensor, start: int) -> int:
    import numpy as np

    words = slice_flat.view(torch.int16 if slice_flat.element_size() == 2 else torch.int32).numpy()
    words = words.view(np.uint16 if words.itemsize == 2 else np.uint32)
    kernel = _kernel()

    def piece(begin: int) -> int:
        return int(kernel(words[begin : begin + _PIECE], np.uint64(hashed), np.uint64(start + begin)))

    begins = range(0, len(words), _PIECE)
    if len(begins) == 1:
        return piece(0)
    return sum(_threads().map(piece, begins)) & _MASK


@cache
def _threads() -> ThreadPoolExecutor:
    # Threads of our own around a kernel without the GIL: numba's parallel loops may not be entered from two threads at
    # once with its default threading layer, and bring a second OpenMP into the process with another.
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads()), thread_name_prefix="digest")


@cache
def _kernel() -> Callable[[Any, Any, Any], Any]:
    import numba
    import numpy as np

    one, shift_1, shift_2, shift_3 = np.uint64(1), np.uint64(30), np.uint64(27), np.uint64(31)
    mix_1, mix_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)

    def kernel(words: Any, hashed: Any, start: Any) -> Any:
        total = np.uint64(0)
        position = start
        for i in range(len(words)):
            z = hashed ^ position
            z = (z ^ (z >> shift_1)) * mix_1
            z = (z ^ (z >> shift_2)) * mix_2
            z = z ^ (z >> shift_3)
            total += np.uint64(words[i]) * z
            position += one
        return total

    compiled: Callable[[Any, Any, Any], Any] = numba.njit(nogil=True, cache=True)(kernel)
    return compiled
