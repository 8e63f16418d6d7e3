"""What must hold of an objective, and of a row for its sake. Pure; reads messages, knows no tensors."""

from __future__ import annotations

import math

from antiphon.learner.v1 import learner_pb2

from services.common.errors import InvalidRequest

BOUNDED_BELOW = (learner_pb2.CORRECTION_KIND_ICEPOP, learner_pb2.CORRECTION_KIND_SEQ_MASK)
BOUNDED_ABOVE = (*BOUNDED_BELOW, learner_pb2.CORRECTION_KIND_TIS, learner_pb2.CORRECTION_KIND_SEQ_TIS)


def check_objective(step: str, header: learner_pb2.StepHeader) -> None:
    """Raises InvalidRequest that says what was expected and what came. `step` names it."""
    if header.WhichOneof("objective") != "policy":
        raise InvalidRequest(f"{step}: expected a policy objective, got {header.WhichOneof('objective')}")
    policy = header.policy
    _expect_one_of(step, "policy loss", policy.loss, learner_pb2.PolicyLoss)
    _expect_one_of(step, "aggregation", policy.aggregation, learner_pb2.Aggregation)
    if not 0.0 < policy.temperature < math.inf:
        raise InvalidRequest(f"{step}: temperature {policy.temperature}; expected one above 0")
    _check_bounds(step, policy)
    if policy.HasField("correction"):
        _check_correction(step, policy)
    if policy.HasField("kl"):
        _check_kl(step, policy.kl)
    if not math.isfinite(policy.entropy_coefficient):
        raise InvalidRequest(f"{step}: entropy_coefficient {policy.entropy_coefficient}; expected a number")


def check_needs(step: str, policy: learner_pb2.PolicyObjective, row: learner_pb2.TrainTrajectory) -> None:
    """Raises InvalidRequest when a row lacks what the objective reads of it."""
    where = f"{step}, trajectory {row.trajectory_id}"
    if not any(row.loss_mask):
        return
    needs_behavior = policy.HasField("correction") or policy.ratio_to_behavior or policy.kl.ratio_cap > 0.0
    if needs_behavior and not row.behavior_logprobs:
        raise InvalidRequest(f"{where}: no behavior_logprobs, and the objective reads them")
    if policy.HasField("kl") and not row.reference_logprobs:
        raise InvalidRequest(f"{where}: no reference_logprobs, and the KL loss reads them")
    if policy.loss == learner_pb2.POLICY_LOSS_GSPO:
        advantages = {a for a, trained in zip(row.advantages, row.loss_mask, strict=True) if trained}
        if len(advantages) > 1:
            raise InvalidRequest(
                f"{where}: {len(advantages)} different advantages, {min(advantages)} to {max(advantages)}; GSPO wants "
                "one for all tokens of a sequence"
            )


def _check_bounds(step: str, policy: learner_pb2.PolicyObjective) -> None:
    low_matters = policy.loss != learner_pb2.POLICY_LOSS_CISPO
    if not (0.0 < policy.clip_high < math.inf) or (low_matters and not 0.0 < policy.clip_low < 1.0):
        raise InvalidRequest(
            f"{step}: clip_low {policy.clip_low}, clip_high {policy.clip_high}; "
            "expected the first between 0 and 1, the second above 0"
        )
    if policy.dual_clip and not 1.0 < policy.dual_clip < math.inf:
        raise InvalidRequest(f"{step}: dual_clip {policy.dual_clip}; expected one above 1, or 0 for none")
    if policy.dual_clip and policy.loss != learner_pb2.POLICY_LOSS_PPO:
        raise InvalidRequest(f"{step}: dual_clip {policy.dual_clip} has no effect on a loss that is not PPO's")
    if policy.loss == learner_pb2.POLICY_LOSS_GSPO and policy.aggregation != learner_pb2.AGGREGATION_SEQUENCE:
        raise InvalidRequest(f"{step}: GSPO's loss is one per sequence; expected AGGREGATION_SEQUENCE")
    constant = policy.aggregation == learner_pb2.AGGREGATION_CONSTANT
    if constant and policy.constant_length < 1:
        raise InvalidRequest(f"{step}: constant_length {policy.constant_length}; expected the tokens of L_max")


def _check_correction(step: str, policy: learner_pb2.PolicyObjective) -> None:
    correction = policy.correction
    _expect_one_of(step, "correction", correction.kind, learner_pb2.CorrectionKind)
    if policy.ratio_to_behavior:
        raise InvalidRequest(f"{step}: a correction beside ratio_to_behavior would count the same gap twice")
    if correction.kind in BOUNDED_ABOVE and not 0.0 < correction.high < math.inf:
        raise InvalidRequest(f"{step}: correction.high {correction.high}; expected one above 0")
    if correction.kind in BOUNDED_BELOW and not 0.0 <= correction.low < correction.high:
        raise InvalidRequest(
            f"{step}: correction.low {correction.low}, correction.high {correction.high}; expected the first to be at "
            "least 0 and below the second"
        )


def _check_kl(step: str, kl: learner_pb2.KlLoss) -> None:
    _expect_one_of(step, "kl.estimator", kl.estimator, learner_pb2.KlEstimator)
    if kl.estimator == learner_pb2.KL_ESTIMATOR_K1:
        raise InvalidRequest(f"{step}: k1 as a loss has an expected gradient of 0; expected k2 or k3")
    if not 0.0 <= kl.coefficient < math.inf or not 0.0 <= kl.ratio_cap < math.inf:
        raise InvalidRequest(
            f"{step}: kl.coefficient {kl.coefficient}, kl.ratio_cap {kl.ratio_cap}; expected neither below 0"
        )


def _expect_one_of(step: str, what: str, value: int, enum: object) -> None:
    known = [name for name, number in enum.items() if number]  # type: ignore[attr-defined]
    if value not in [enum.Value(name) for name in known]:  # type: ignore[attr-defined]
        raise InvalidRequest(f"{step}: {what} {value} is not known; expected one of {', '.join(known)}")
