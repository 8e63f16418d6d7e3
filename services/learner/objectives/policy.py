"""The policy objective: a surrogate, a correction, KL to the reference and entropy, put together as a message asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from antiphon.learner.v1 import learner_pb2

from services.learner.objectives import correction, kl
from services.learner.objectives.cispo import cispo_surrogate
from services.learner.objectives.correction import Weigh
from services.learner.objectives.gspo import gspo_surrogate
from services.learner.objectives.masking import log_ratio, selected
from services.learner.objectives.ppo import ppo_surrogate
from services.learner.objectives.rows import on_tokens, row_counts
from services.learner.objectives.terms import TokenFields, TokenTerms

Message = learner_pb2.PolicyObjective
Surrogate = Callable[[torch.Tensor, torch.Tensor, TokenFields], TokenTerms]
"""log π_θ, log π_old, fields → loss, ratio, clipped."""


def _ppo(message: Message) -> Surrogate:
    low, high, dual = message.clip_low, message.clip_high, message.dual_clip or None
    return lambda new, old, fields: ppo_surrogate(
        new, old, fields.advantages, fields.mask, clip_low=low, clip_high=high, dual_clip=dual
    )


def _gspo(message: Message) -> Surrogate:
    low, high = message.clip_low, message.clip_high
    return lambda new, old, fields: gspo_surrogate(
        new, old, fields.advantages, fields.mask, fields.lengths, clip_low=low, clip_high=high
    )


def _cispo(message: Message) -> Surrogate:
    high = message.clip_high
    return lambda new, old, fields: cispo_surrogate(new, old, fields.advantages, fields.mask, clip_high=high)


SURROGATES: dict[int, Callable[[Message], Surrogate]] = {
    learner_pb2.POLICY_LOSS_PPO: _ppo,
    learner_pb2.POLICY_LOSS_GSPO: _gspo,
    learner_pb2.POLICY_LOSS_CISPO: _cispo,
}

CORRECTIONS: dict[int, Callable[[learner_pb2.Correction], Weigh]] = {
    learner_pb2.CORRECTION_KIND_TIS: lambda message: correction.tis(message.high),
    learner_pb2.CORRECTION_KIND_ICEPOP: lambda message: correction.icepop(message.low, message.high),
    learner_pb2.CORRECTION_KIND_SEQ_TIS: lambda message: correction.seq_tis(message.high),
    learner_pb2.CORRECTION_KIND_SEQ_MASK: lambda message: correction.seq_mask(message.low, message.high),
    learner_pb2.CORRECTION_KIND_DECOUPLED: lambda message: correction.decoupled(),
}

KL_LOSSES: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    learner_pb2.KL_ESTIMATOR_K2: kl.k2,
    learner_pb2.KL_ESTIMATOR_K3: kl.k3,
}

DIVISORS: dict[int, Callable[[Message, int, int], float]] = {
    learner_pb2.AGGREGATION_TOKEN: lambda message, tokens, sequences: tokens,
    learner_pb2.AGGREGATION_SEQUENCE: lambda message, tokens, sequences: sequences,
    learner_pb2.AGGREGATION_CONSTANT: lambda message, tokens, sequences: sequences * message.constant_length,
}


class PolicyObjective:
    """What a `PolicyObjective` message asks for, which was checked (services/learner/batch_checks.py)."""

    def __init__(self, message: Message) -> None:
        self.temperature = message.temperature
        self._message = message
        self._surrogate = SURROGATES[message.loss](message)
        corrected = message.HasField("correction")
        self._weigh = CORRECTIONS[message.correction.kind](message.correction) if corrected else None
        self._kl = KL_LOSSES[message.kl.estimator] if message.HasField("kl") else None

    def terms(
        self, logprobs: torch.Tensor, entropies: torch.Tensor, old_logprobs: torch.Tensor, fields: TokenFields
    ) -> TokenTerms:
        message, mask = self._message, fields.mask
        old = fields.behavior_logprobs if message.ratio_to_behavior else old_logprobs
        terms = self._surrogate(logprobs, old, fields)
        if self._weigh is not None:
            log_w = log_ratio(old_logprobs, fields.behavior_logprobs, mask).detach()
            weights = self._weigh(log_w, mask, fields.lengths)
            terms = replace(terms, loss=terms.loss * weights, weights=log_w.exp(), silenced=(weights == 0.0) & mask)
        if self._kl is not None:
            each = self._kl(log_ratio(logprobs, fields.reference_logprobs, mask))
            weighted = message.kl.coefficient * each
            if message.kl.ratio_cap:
                weighted = weighted * kl.capped_ratio(logprobs, fields.behavior_logprobs, mask, message.kl.ratio_cap)
            terms = replace(terms, loss=terms.loss + weighted, kl=each.detach())
        if message.entropy_coefficient:
            terms = replace(terms, loss=terms.loss - message.entropy_coefficient * selected(entropies, mask))
        if message.aggregation == learner_pb2.AGGREGATION_SEQUENCE:
            shares = on_tokens(1.0 / row_counts(mask, fields.lengths), fields.lengths, len(mask))
            terms = replace(terms, loss=terms.loss * shares)
        return terms

    def divisor(self, tokens: int, sequences: int) -> float:
        return DIVISORS[self._message.aggregation](self._message, tokens, sequences)
