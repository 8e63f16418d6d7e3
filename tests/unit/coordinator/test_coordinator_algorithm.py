"""Settings of an algorithm: what they become for the learner, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2
from pydantic import ValidationError

from services.coordinator.algorithm_settings import AlgorithmConfig
from services.coordinator.algorithms.objectives import objective
from services.coordinator.config import CoordinatorConfig, SamplingConfig
from services.learner.objective_checks import check_objective

SAMPLING = SamplingConfig(temperature=0.5, max_tokens=64)


def message(**algorithm: Any) -> learner_pb2.PolicyObjective:
    return objective(AlgorithmConfig(**algorithm), SAMPLING)


def test_defaults() -> None:
    assert message() == learner_pb2.PolicyObjective(
        loss=learner_pb2.POLICY_LOSS_PPO,
        clip_low=0.2,
        clip_high=0.2,
        aggregation=learner_pb2.AGGREGATION_TOKEN,
        temperature=0.5,
    )


def test_every_setting_reaches_the_message() -> None:
    made = message(
        loss={"type": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "aggregation": "constant"},
        correction={"type": "icepop", "low": 0.25, "high": 4.0},
        kl={"coefficient": 0.5, "estimator": "k3", "ratio_cap": 2.0},
        entropy_coefficient=0.125,
    )
    assert made == learner_pb2.PolicyObjective(
        loss=learner_pb2.POLICY_LOSS_PPO,
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        aggregation=learner_pb2.AGGREGATION_CONSTANT,
        constant_length=64,
        temperature=0.5,
        correction=learner_pb2.Correction(kind=learner_pb2.CORRECTION_KIND_ICEPOP, low=0.25, high=4.0),
        kl=learner_pb2.KlLoss(estimator=learner_pb2.KL_ESTIMATOR_K3, coefficient=0.5, ratio_cap=2.0),
        entropy_coefficient=0.125,
    )
    assert message(ratio_to="behavior").ratio_to_behavior


@pytest.mark.parametrize(
    ("algorithm", "aggregation"),
    [
        ({"advantage": {"type": "dr_grpo"}}, learner_pb2.AGGREGATION_CONSTANT),
        ({"loss": {"type": "gspo"}}, learner_pb2.AGGREGATION_SEQUENCE),
        ({"loss": {"type": "cispo"}}, learner_pb2.AGGREGATION_TOKEN),
        ({"loss": {"type": "cispo", "aggregation": "sequence"}}, learner_pb2.AGGREGATION_SEQUENCE),
        *(({"correction": {"type": t}}, 1) for t in ("tis", "icepop", "seq_tis", "seq_mask", "decoupled")),
        *(({"advantage": {"type": t}}, 1) for t in ("rloo", "reinforce", "reinforce_baseline")),
    ],
)
def test_what_settings_make_the_learner_takes(algorithm: dict[str, Any], aggregation: int) -> None:
    made = message(**algorithm)
    assert made.aggregation == aggregation
    check_objective("step 1", learner_pb2.StepHeader(policy=made))


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "k1 as a loss has an expected gradient of 0; take k2 or k3"),
        ({"advantage": {"type": "dr_grpo"}, "loss": {"type": "gspo"}}, "divides by a constant length"),
        ({"advantage": {"type": "dr_grpo"}, "loss": {"type": "ppo", "aggregation": "token"}}, "leave loss.aggregation"),
        ({"loss": {"type": "gspo", "aggregation": "token"}}, "sequence"),
        ({"loss": {"type": "gspo"}, "advantage": {"type": "reinforce", "gamma": 0.9}}, "set advantage.gamma to 1"),
        ({"ratio_to": "behavior", "correction": {"type": "tis"}}, "count the same gap twice"),
        ({"truncated_penalty": 0.5}, "has no effect without truncated: penalise"),
        ({"advantage": {"type": "gpro"}}, "grpo"),
        ({"loss": {"type": "ppo", "dual_clip": 1.0}}, "greater than 1"),
        ({"correction": {"type": "icepop", "low": 6.0}}, "low 6.0 is not below high 5.0"),
        ({"correction": {"type": "seq_mask", "high": 0.5}}, "every token would be silenced"),
    ],
)
def test_what_does_not_go_together(algorithm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig(**algorithm)


def run(**changes: Any) -> CoordinatorConfig:
    tree = {"steps": 1, "data": {"path": "x"}, "prompts_per_step": 2, "samples_per_prompt": 2, "scorer": "s"}
    return CoordinatorConfig.model_validate({**tree, "sampling": {"max_tokens": 8}, **changes})


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
def test_one_sample_is_too_few_for_what_compares_samples(kind: str) -> None:
    with pytest.raises(
        ValidationError, match=rf"samples_per_prompt is 1, and advantage '{kind}' compares .* 'reinforce'"
    ):
        run(samples_per_prompt=1, algorithm={"advantage": {"type": kind}})
    assert run(samples_per_prompt=1, algorithm={"advantage": {"type": "reinforce"}}).samples_per_prompt == 1


def test_a_buffer_longer_than_an_answer() -> None:
    with pytest.raises(ValidationError, match=r"overlong\.buffer 9 > sampling\.max_tokens 8.*take 1 to 8"):
        run(algorithm={"overlong": {"buffer": 9}})
