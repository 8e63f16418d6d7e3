"""From the settings of an algorithm to the objective that the learner is sent."""

from __future__ import annotations

from antiphon.learner.v1 import learner_pb2

from services.coordinator.algorithm_settings import AlgorithmConfig, Correction, KlConfig
from services.coordinator.config import SamplingConfig

_LOSSES = {
    "ppo": learner_pb2.POLICY_LOSS_PPO,
    "gspo": learner_pb2.POLICY_LOSS_GSPO,
    "cispo": learner_pb2.POLICY_LOSS_CISPO,
}
_AGGREGATIONS = {
    "token": learner_pb2.AGGREGATION_TOKEN,
    "sequence": learner_pb2.AGGREGATION_SEQUENCE,
    "constant": learner_pb2.AGGREGATION_CONSTANT,
}
_CORRECTIONS = {
    "tis": learner_pb2.CORRECTION_KIND_TIS,
    "icepop": learner_pb2.CORRECTION_KIND_ICEPOP,
    "seq_tis": learner_pb2.CORRECTION_KIND_SEQ_TIS,
    "seq_mask": learner_pb2.CORRECTION_KIND_SEQ_MASK,
    "decoupled": learner_pb2.CORRECTION_KIND_DECOUPLED,
}
_ESTIMATORS = {
    "k1": learner_pb2.KL_ESTIMATOR_K1,
    "k2": learner_pb2.KL_ESTIMATOR_K2,
    "k3": learner_pb2.KL_ESTIMATOR_K3,
}


def objective(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> learner_pb2.PolicyObjective:
    """What the learner minimises; the temperature is that of the sampling."""
    loss = algorithm.loss
    message = learner_pb2.PolicyObjective(
        loss=_LOSSES[loss.type],
        clip_low=getattr(loss, "clip_low", 0.0),
        clip_high=loss.clip_high,
        dual_clip=getattr(loss, "dual_clip", None) or 0.0,
        aggregation=_AGGREGATIONS[algorithm.aggregation],
        constant_length=sampling.max_tokens if algorithm.aggregation == "constant" else 0,
        temperature=sampling.temperature,
        entropy_coefficient=algorithm.entropy_coefficient,
        ratio_to_behavior=algorithm.ratio_to == "behavior",
    )
    if algorithm.correction is not None:
        message.correction.CopyFrom(_correction(algorithm.correction))
    if algorithm.kl is not None:
        message.kl.CopyFrom(_kl(algorithm.kl))
    return message


def _correction(correction: Correction) -> learner_pb2.Correction:
    high = getattr(correction, "high", getattr(correction, "cap", 0.0))
    return learner_pb2.Correction(kind=_CORRECTIONS[correction.type], low=getattr(correction, "low", 0.0), high=high)


def _kl(kl: KlConfig) -> learner_pb2.KlLoss:
    return learner_pb2.KlLoss(estimator=_ESTIMATORS[kl.estimator], coefficient=kl.coefficient, ratio_cap=kl.ratio_cap)
