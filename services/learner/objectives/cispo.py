"""CISPO: the ratio is a bounded weight on the log-probability (docs/math.md, "Policy loss").

Source: MiniMax 2025, arXiv:2506.13585, equations 4 and 5, with no lower bound, as its authors set it.
"""

from __future__ import annotations

import torch

from services.learner.objectives.masking import log_ratio, selected
from services.learner.objectives.terms import TokenTerms


def cispo_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_high: float,
) -> TokenTerms:
    """L_t = −sg(clip(ρ_t, 0, 1+ε_high)) A_t log π_θ. All tensors have one shape; no token loses its gradient."""
    ratio = log_ratio(logprobs, old_logprobs, mask).exp().detach()
    bounded = ratio.clamp(max=1.0 + clip_high)
    loss = -bounded * selected(advantages.detach(), mask) * selected(logprobs, mask)
    return TokenTerms(loss=loss, ratio=ratio, clipped=ratio > bounded)
