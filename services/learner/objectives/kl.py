"""KL to the reference policy as a loss, per token (docs/math.md, "KL to the reference").

d = log π_θ − log π_ref. On policy the gradient of k2 is that of the reverse KL(π_θ‖π_ref), that of k3 the forward
KL(π_ref‖π_θ)'s; k1's expected gradient is 0. Source: Schulman 2020, "Approximating KL divergence"; gradients: Tang and
Munos 2025, arXiv:2506.09477.
"""

from __future__ import annotations

import torch

from services.learner.objectives.masking import log_ratio

LONGEST_LOG_RATIO = 20.0
"""d is clamped to it before the exponential."""


def k2(d: torch.Tensor) -> torch.Tensor:
    """d²/2"""
    return 0.5 * d * d


def k3(d: torch.Tensor) -> torch.Tensor:
    """e^{−d} − 1 + d"""
    held = d.clamp(-LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)
    return torch.expm1(-held) + held


def capped_ratio(
    logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(π_θ/μ, C), without gradient: what a KL loss is weighted by where another policy sampled the tokens."""
    return log_ratio(logprobs, behavior_logprobs, mask).detach().exp().clamp(max=cap)
