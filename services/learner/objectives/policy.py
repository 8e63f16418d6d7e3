"""The policy's surrogate losses (docs/math.md, "Policy loss"). Pure functions on tensors of any one shape."""

from __future__ import annotations

import torch
from antiphon.learner.v1 import learner_pb2

from services.learner.objectives.terms import TokenFields, TokenTerms


def ppo_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenTerms:
    """L_t = −min(ρ_t A_t, clip(ρ_t, 1−ε_low, 1+ε_high) A_t) with ρ_t = exp(log π_θ − log π_old).

    All tensors have one shape, packed [T] or padded [B, T]; `mask` is bool. Masked slots are replaced before the
    arithmetic, so they may hold anything; their loss is 0 and their ratio 1. Gradient flows through `logprobs` alone.
    """
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    # Both sides of the difference are selected, so a NaN in a masked slot has no gradient either.
    log_ratio = torch.where(mask, logprobs.float(), zero) - torch.where(mask, old_logprobs.detach().float(), zero)
    chosen = torch.where(mask, advantages.detach().float(), zero)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * chosen, clipped_ratio * chosen)
    # Only where the minimum is the clipped branch is the token without gradient.
    clipped = (clipped_ratio * chosen < ratio * chosen).detach()
    return TokenTerms(loss=loss, ratio=ratio.detach(), clipped=clipped)


class PolicyObjective:
    """What a `PolicyObjective` message asks for."""

    def __init__(self, message: learner_pb2.PolicyObjective) -> None:
        self.temperature = message.temperature
        self._clip_low = message.clip_low
        self._clip_high = message.clip_high

    def terms(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, fields: TokenFields) -> TokenTerms:
        return ppo_surrogate(
            logprobs,
            old_logprobs,
            fields.advantages,
            fields.mask,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
        )
