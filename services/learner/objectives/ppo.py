"""PPO's clipped surrogate, one ratio per token (docs/math.md, "Policy loss").

Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; two bounds of their own (clip-higher): Yu et al. 2025, DAPO,
arXiv:2503.14476; dual clip: Ye et al. 2020, arXiv:1912.09729.
"""

from __future__ import annotations

import torch

from services.learner.objectives.masking import log_ratio, selected
from services.learner.objectives.terms import TokenTerms


def ppo_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenTerms:
    """L_t = −min(ρ_t A_t, clip(ρ_t, 1−ε_low, 1+ε_high) A_t) with ρ_t = exp(log π_θ − log π_old).

    With a dual clip c, L_t is at most −c A_t where A_t < 0: a token that became much likelier and is bad would
    otherwise have a loss without bound. All tensors have one shape; gradient flows through `logprobs` alone.
    """
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    chosen = selected(advantages.detach(), mask)
    free, held = ratio * chosen, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * chosen
    gain = torch.minimum(free, held)
    clipped = held < free  # only there is the minimum the branch without gradient
    if dual_clip is not None:
        floor = dual_clip * chosen
        bounded = (chosen < 0.0) & (gain < floor)
        gain = torch.where(bounded, floor, gain)
        clipped = clipped | bounded
    return TokenTerms(loss=-gain, ratio=ratio.detach(), clipped=clipped.detach())
