"""GSPO: PPO's clip on one ratio per sequence (docs/math.md, "Policy loss").

Source: Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7.
"""

from __future__ import annotations

import torch

from services.learner.objectives.masking import log_ratio, selected
from services.learner.objectives.rows import on_tokens, row_means
from services.learner.objectives.terms import TokenTerms


def gspo_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenTerms:
    """L_i = −min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i) with s_i = exp(mean over the row of log π_θ − log π_old).

    Tensors [T], lengths [R] (see rows.py). Every token of a row has its row's loss, so that the mean over the row is
    the row's. The advantage is one for all tokens of a row.
    """
    means = row_means(log_ratio(logprobs, old_logprobs, mask), mask, lengths)
    ratio = torch.where(mask, on_tokens(means, lengths, len(logprobs)), 0.0).exp()
    chosen = selected(advantages.detach(), mask)
    free, held = ratio * chosen, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * chosen
    return TokenTerms(loss=-torch.minimum(free, held), ratio=ratio.detach(), clipped=(held < free).detach())
