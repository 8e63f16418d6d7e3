"""The digest of digest.py on a GPU, in one pass over the weights: the formula is there.

In torch's own operations it would read and write every word twenty times over, longer than the publication itself.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# triton comes with torch for CUDA, and is not there for CPU.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


def add_to(total: torch.Tensor, hashed: int, slice_flat: torch.Tensor, start: int) -> None:
    """Adds the digest of a slice (1-D, contiguous, 2- or 4-byte elements) to `total` [1] int64, on its device.

    `hashed` is fnv64 of the tensor's name, as a signed number.
    """
    words = slice_flat.view(torch.int16 if slice_flat.element_size() == 2 else torch.int32)
    grid = (triton.cdiv(words.numel(), _BLOCK),)
    with torch.cuda.device(words.device):
        _kernel[grid](words, words.numel(), start, hashed, total, 8 * slice_flat.element_size(), _BLOCK)


@triton.jit(do_not_specialize=["count", "start", "hashed"])
def _kernel(words, count, start, hashed, total, bits: tl.constexpr, block: tl.constexpr):  # noqa: PLR0917
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < count
    word = tl.load(words + offsets, mask=inside, other=0).to(tl.int64) & ((1 << bits) - 1)
    # Shifts of signed numbers bring ones in at the left: they are masked away.
    z = (offsets + start) ^ hashed
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    tl.atomic_add(total, tl.sum(word * z, axis=0), sem="relaxed")
