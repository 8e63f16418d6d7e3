"""What goes into an objective and what comes out, per token. Rows of a micro-batch lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class TokenFields:
    """What a Batch says of the T tokens of one micro-batch, beside their ids."""

    advantages: torch.Tensor
    """[T]"""
    mask: torch.Tensor
    """[T] bool: the tokens that are trained on."""
    lengths: torch.Tensor
    """[R] int64: tokens of each row; they sum to T."""
    behavior_logprobs: torch.Tensor
    """[T], NaN where none was sent."""
    reference_logprobs: torch.Tensor
    """[T], NaN where none was sent."""


@dataclass(frozen=True)
class TokenTerms:
    """What an objective makes of them: [T] each, float32 but for the flags."""

    loss: torch.Tensor
    """0 where masked; the only one with a gradient."""
    ratio: torch.Tensor
    """π_θ / π_old, of the token or of its sequence; 1 where masked."""
    clipped: torch.Tensor
    """bool: the clip took the token's gradient away, or bounded its weight."""
    weights: torch.Tensor | None = None
    """w = π_old / μ of each token, 1 where masked; None without a correction."""
    silenced: torch.Tensor | None = None
    """bool: the correction took the token out of the loss."""
    kl: torch.Tensor | None = None
    """The estimate of the KL to the reference, 0 where masked; None without a KL loss."""


class Objective(Protocol):
    """A loss per token. Its sum over all tokens of an Update is divided once."""

    temperature: float

    def terms(
        self, logprobs: torch.Tensor, entropies: torch.Tensor, old_logprobs: torch.Tensor, fields: TokenFields
    ) -> TokenTerms:
        """[T] each."""
        ...

    def divisor(self, tokens: int, sequences: int) -> float:
        """Of an Update with so many unmasked tokens in so many sequences, over all ranks and micro-batches."""
        ...
