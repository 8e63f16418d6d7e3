"""Masked slots may hold anything, NaN included, and never reach the arithmetic (docs/math.md, rule 3)."""

from __future__ import annotations

import torch


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values as float32, 0 where masked; a NaN there has no gradient either."""
    return torch.where(mask, values.float(), torch.zeros((), dtype=torch.float32, device=values.device))


def log_ratio(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs − others, 0 where masked, both selected before the difference; no gradient through `others`."""
    return selected(logprobs, mask) - selected(others.detach(), mask)
