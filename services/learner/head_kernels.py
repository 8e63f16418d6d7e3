"""What the log-prob head does with a chunk of logits on a GPU, in one pass over them. Needs triton.

The logits of one predicted token are a row [V] in the dtype of the hidden states; arithmetic is float32, z = logit / T.
"""

# mypy: disable-error-code="no-untyped-def"
# triton 3.6 compiles the annotations of a kernel with it, and knows none of Python's own.

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROW_BLOCK = 8192
"""Logits of a row that one program holds at a time."""
SLOPE_BLOCK = 4096


@triton.jit
def _statistics(  # noqa: PLR0917
    logits,
    targets,
    logprobs,
    normalisers,
    entropies,
    vocabulary,
    temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin_of_row = logits + row * vocabulary
    largest = float("-inf")
    total = 0.0  # Σ exp(z − largest)
    weighted = 0.0  # Σ exp(z − largest) z
    for begin in range(0, vocabulary, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = tl.load(begin_of_row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        seen = tl.maximum(largest, tl.max(z, axis=0))
        shrunk = tl.exp(largest - seen)
        share = tl.exp(z - seen)
        total = total * shrunk + tl.sum(share, axis=0)
        weighted = weighted * shrunk + tl.sum(tl.where(z == float("-inf"), 0.0, share * z), axis=0)
        largest = seen
    normaliser = largest + tl.log(total)
    chosen = tl.load(begin_of_row + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, normaliser - weighted / total)


@triton.jit
def _slopes(  # noqa: PLR0917
    logits,
    targets,
    normalisers,
    gradients,
    vocabulary,
    temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    places = logits + row * vocabulary + columns
    z = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    slope = (chosen - tl.exp(z - tl.load(normalisers + row))) * (tl.load(gradients + row) / temperature)
    tl.store(places, slope.to(logits.dtype.element_ty), mask=inside)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [C, V], targets [C] → log p(target), logsumexp(z), entropy; each [C] float32."""
    count, vocabulary = logits.shape
    logprobs, normalisers, entropies = torch.empty((3, count), dtype=torch.float32, device=logits.device)
    _statistics[(count,)](
        logits, targets, logprobs, normalisers, entropies, vocabulary, temperature, BLOCK=ROW_BLOCK, num_warps=16
    )
    return logprobs, normalisers, entropies


def slopes_in_place(
    logits: torch.Tensor, targets: torch.Tensor, normalisers: torch.Tensor, gradients: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Puts d loss / d logits where the logits [C, V] are, given d loss / d log p [C]: (onehot − p) · gradient / T."""
    count, vocabulary = logits.shape
    grid = (count, triton.cdiv(vocabulary, SLOPE_BLOCK))
    _slopes[grid](logits, targets, normalisers, gradients, vocabulary, temperature, BLOCK=SLOPE_BLOCK, num_warps=8)
    return logits
