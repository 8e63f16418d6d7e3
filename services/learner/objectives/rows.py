"""Sums over the tokens of each row of a micro-batch. Deterministic on every device, differentiable."""

from __future__ import annotations

import torch


def row_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """values [T], the R rows one after the other, lengths [R] → [R]."""
    # Its own look at the lengths would wait for a GPU; on the CPU, where tests run, it costs nothing.
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=values.is_cuda)


def row_means(values: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Means over the unmasked tokens of each row, [R]; 0 for a row without one. `values` are 0 where masked."""
    return row_sums(values, lengths) / row_counts(mask, lengths)


def row_counts(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Unmasked tokens of each row, 1 at the least, [R] float32."""
    return row_sums(mask.float(), lengths).clamp(min=1.0)


def on_tokens(values: torch.Tensor, lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """values [R] → [T]: to each token that of its row. `tokens` is T, which a GPU need not be asked for."""
    return torch.repeat_interleave(values, lengths, output_size=tokens)
