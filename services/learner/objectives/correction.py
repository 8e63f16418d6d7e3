"""Weights for tokens that another policy sampled than the one that is trained (docs/math.md, "Correction").

w = π_old / μ per token: π_old the trainer's policy at the start of the Step, μ the policy that sampled, as the engine
reported it. Each function: log w [T] (0 where masked), mask [T], lengths [R] → weights [T] without gradient. They act
on the loss alone; a token that they silence stays in every count.

Sources: `tis` Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; `icepop` Ling
team 2025, "Small leak can sink a great ship"; `seq_tis`, `seq_mask` Liu et al. 2025, "When speed kills stability";
`decoupled` Hilton et al. 2021, arXiv:2110.00641, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.learner.objectives.rows import on_tokens, row_means, row_sums

Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tis(high: float) -> Weigh:
    """min(w_t, C)"""
    return lambda log_w, mask, lengths: log_w.exp().clamp(max=high)


def icepop(low: float, high: float) -> Weigh:
    """w_t if lo <= w_t <= hi else 0"""

    def weigh(log_w: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        w = log_w.exp()
        return torch.where((low <= w) & (w <= high), w, 0.0)

    return weigh


def seq_tis(high: float) -> Weigh:
    """min(exp of the sum of log w over the sequence, C), on each of its tokens"""

    def weigh(log_w: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return on_tokens(row_sums(log_w, lengths).exp().clamp(max=high), lengths, len(log_w))

    return weigh


def seq_mask(low: float, high: float) -> Weigh:
    """w_t if lo <= exp of the mean of log w over the sequence <= hi else 0"""

    def weigh(log_w: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mean = row_means(log_w, mask, lengths).exp()
        kept = on_tokens((low <= mean) & (mean <= high), lengths, len(log_w))
        return torch.where(kept, log_w.exp(), 0.0)

    return weigh


def decoupled() -> Weigh:
    """w_t"""
    return lambda log_w, mask, lengths: log_w.exp()
