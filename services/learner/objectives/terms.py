"""What goes into an objective and what comes out, per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class TokenFields:
    """What a Batch says of the tokens of one micro-batch, beside their ids. All of one shape."""

    advantages: torch.Tensor
    mask: torch.Tensor
    """bool: the tokens that are trained on."""


@dataclass(frozen=True)
class TokenTerms:
    """What an objective makes of them, in the same shape, float32."""

    loss: torch.Tensor
    """0 where masked; the only one with a gradient."""
    ratio: torch.Tensor
    """π_θ / π_old, 1 where masked."""
    clipped: torch.Tensor
    """bool: the clip took the token's gradient away."""


class Objective(Protocol):
    """A loss per token. Its sum is divided once, by the token count of the whole Update."""

    temperature: float

    def terms(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, fields: TokenFields) -> TokenTerms: ...
