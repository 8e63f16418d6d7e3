"""What an objective must hold, and what it needs of each row: refused at once, with what to change."""

from __future__ import annotations

import re

import pytest
from antiphon.learner.v1 import learner_pb2

from services.common.errors import InvalidRequest
from services.learner.objective_checks import check_needs, check_objective

NAN = float("nan")


def policy(**changes):
    fields = {
        "loss": learner_pb2.POLICY_LOSS_PPO,
        "aggregation": learner_pb2.AGGREGATION_TOKEN,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "temperature": 1.0,
    }
    return learner_pb2.PolicyObjective(**{**fields, **changes})


def correction(kind, low=0.0, high=0.0):
    return learner_pb2.Correction(kind=learner_pb2.CorrectionKind.Value(f"CORRECTION_KIND_{kind}"), low=low, high=high)


def kl(estimator, coefficient=0.1, cap=0.0):
    value = learner_pb2.KlEstimator.Value(f"KL_ESTIMATOR_{estimator}")
    return learner_pb2.KlLoss(estimator=value, coefficient=coefficient, ratio_cap=cap)


GSPO = {"loss": learner_pb2.POLICY_LOSS_GSPO, "aggregation": learner_pb2.AGGREGATION_SEQUENCE}
CONSTANT = {"aggregation": learner_pb2.AGGREGATION_CONSTANT}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        GSPO,
        {"loss": learner_pb2.POLICY_LOSS_CISPO, "clip_low": 0.0},
        {"dual_clip": 3.0},
        CONSTANT | {"constant_length": 100},
        *({"correction": correction(kind, 0.5, 5.0)} for kind in ("TIS", "ICEPOP", "SEQ_TIS", "SEQ_MASK", "DECOUPLED")),
        {"correction": correction("DECOUPLED")},
        {"kl": kl("K2")},
        {"kl": kl("K3", 0.0, 2.0)},
        {"entropy_coefficient": -0.01},
        {"ratio_to_behavior": True},
    ],
)
def test_taken(changes):
    check_objective("step 1", learner_pb2.StepHeader(policy=policy(**changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": 0}, "policy loss 0 is not known; expected one of POLICY_LOSS_PPO, POLICY_LOSS_GSPO"),
        ({"loss": 99}, "policy loss 99 is not known"),
        ({"aggregation": 0}, "aggregation 0 is not known; expected one of AGGREGATION_TOKEN"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": NAN}, "temperature nan"),
        ({"clip_low": 1.0}, "clip_low 1.0"),
        ({"clip_high": float("inf")}, "clip_high inf"),
        ({"dual_clip": 1.0}, "dual_clip 1.0; expected one above 1"),
        (GSPO | {"dual_clip": 3.0}, "dual_clip 3.0 has no effect"),
        (GSPO | {"aggregation": learner_pb2.AGGREGATION_TOKEN}, "expected AGGREGATION_SEQUENCE"),
        (CONSTANT, "constant_length 0"),
        ({"correction": learner_pb2.Correction()}, "correction 0 is not known"),
        ({"correction": correction("TIS")}, "correction.high 0.0; expected one above 0"),
        ({"correction": correction("SEQ_TIS", high=NAN)}, "correction.high nan"),
        ({"correction": correction("ICEPOP", 5.0, 0.5)}, "correction.low 5.0, correction.high 0.5"),
        ({"correction": correction("SEQ_MASK", -1.0, 0.5)}, "correction.low -1.0"),
        ({"correction": correction("TIS", high=2.0), "ratio_to_behavior": True}, "count the same gap twice"),
        ({"kl": learner_pb2.KlLoss()}, "kl.estimator 0 is not known"),
        ({"kl": kl("K1")}, "k1 as a loss has an expected gradient of 0; expected k2 or k3"),
        ({"kl": kl("K2", -0.1)}, "kl.coefficient -0.1"),
        ({"kl": kl("K2", 0.1, NAN)}, "kl.ratio_cap nan"),
        ({"entropy_coefficient": NAN}, "entropy_coefficient nan"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        check_objective("step 1", learner_pb2.StepHeader(policy=policy(**changes)))
    assert str(refused.value).startswith("step 1: ")


def row(**fields):
    return learner_pb2.TrainTrajectory(
        trajectory_id="a", token_ids=[1, 2, 3], loss_mask=[False, True, True], advantages=[NAN, 1.0, 1.0], **fields
    )


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"correction": correction("TIS", high=2.0)}, "behavior_logprobs"),
        ({"ratio_to_behavior": True}, "behavior_logprobs"),
        ({"kl": kl("K2", 0.1)}, "reference_logprobs"),
    ],
)
def test_a_row_without_what_the_objective_reads(changes, lacks):
    with pytest.raises(InvalidRequest, match=f"step 1, trajectory a: no {lacks}"):
        check_needs("step 1", policy(**changes), row())
    check_needs("step 1", policy(**changes), row(**{lacks: [NAN, -1.0, -1.0]}))
    masked = row()
    masked.loss_mask[:] = [False] * 3
    check_needs("step 1", policy(**changes), masked)


def test_a_capped_kl_reads_both():
    with pytest.raises(InvalidRequest, match="no behavior_logprobs"):
        check_needs("step 1", policy(kl=kl("K3", 0.1, 2.0)), row(reference_logprobs=[NAN, -1.0, -1.0]))


def test_gspo_wants_one_advantage_for_a_sequence():
    several = row()
    several.advantages[:] = [NAN, 1.0, 0.5]
    with pytest.raises(InvalidRequest, match=r"2 different advantages, 0\.5 to 1\.0; GSPO wants one"):
        check_needs("step 1", policy(**GSPO), several)
    check_needs("step 1", policy(**GSPO), row())
    check_needs("step 1", policy(), several)
