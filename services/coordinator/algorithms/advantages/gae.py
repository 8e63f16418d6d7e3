"""Generalised advantage estimation over the trainable tokens of one trajectory.

    delta_t = r_t + gamma V_t' - V_t        A_t = delta_t + gamma lambda A_t'        return_t = A_t + V_t

t' is the next trainable token: values at masked positions never enter, the recursion jumps over them, and gamma and
lambda count trainable tokens. After the last one V is 0, truncated answers included.

Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; docs/math.md, Advantages.
"""

from __future__ import annotations

from collections.abc import Sequence


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], loss_mask_T: Sequence[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns, [T] each, 0 at masked positions. values_T[t] is V at the token that predicts t.

    Masked positions may hold anything, NaN included: they are never read.
    """
    advantages_T, returns_T = [0.0] * len(rewards_T), [0.0] * len(rewards_T)
    following_advantage = following_value = 0.0
    for t in reversed(range(len(rewards_T))):
        if loss_mask_T[t]:
            delta = rewards_T[t] + gamma * following_value - values_T[t]
            following_advantage = delta + gamma * lam * following_advantage
            following_value = values_T[t]
            advantages_T[t], returns_T[t] = following_advantage, following_advantage + values_T[t]
    return advantages_T, returns_T
