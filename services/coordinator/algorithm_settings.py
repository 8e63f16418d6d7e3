"""Settings of the algorithm: from scores to the objective of a Step. What goes with what is checked here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from services.common.config import Config


def _kind_if_none_is_named(kind: str) -> BeforeValidator:
    """A section without `type` is of that kind, so that one of its settings alone may be changed."""
    return BeforeValidator(lambda section: {"type": kind, **section} if isinstance(section, dict) else section)


class _Advantage(Config):
    compares: ClassVar[bool] = True
    """The samples of one prompt with each other: one is too few."""


class GrpoAdvantage(_Advantage):
    """(R - mean of the group) / (std of the group + 1e-6); docs/math.md, Advantages."""

    type: Literal["grpo"] = "grpo"
    norm_by_std: bool = Field(default=True, description="false drops the division")


class DrGrpoAdvantage(_Advantage):
    """R - mean of the group; the loss is divided by a constant length (Dr. GRPO)."""

    type: Literal["dr_grpo"]


class RlooAdvantage(_Advantage):
    """R - mean of the others in the group."""

    type: Literal["rloo"]


class ReinforceAdvantage(_Advantage):
    """R, discounted over the tokens, whitened over the Batch (REINFORCE++)."""

    type: Literal["reinforce"]
    gamma: float = Field(default=1.0, gt=0.0, le=1.0, description="a factor for each trainable token to the end")

    compares: ClassVar[bool] = False


class ReinforceBaselineAdvantage(_Advantage):
    """R - mean of the group, whitened over the Batch (REINFORCE++-baseline)."""

    type: Literal["reinforce_baseline"]


Advantage = Annotated[
    GrpoAdvantage | DrGrpoAdvantage | RlooAdvantage | ReinforceAdvantage | ReinforceBaselineAdvantage,
    Field(discriminator="type"),
    _kind_if_none_is_named("grpo"),
]

AggregationName = Literal["token", "sequence", "constant"]
HOW_TO_AGGREGATE = (
    "token: over all tokens of the Update; sequence: mean of the sequences' means; constant: over sequences x "
    "sampling.max_tokens. null: constant with dr_grpo, else token"
)


class PpoLoss(Config):
    """Clipped surrogate with one ratio per token; docs/math.md, Policy loss."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    dual_clip: float | None = Field(
        default=None, gt=1.0, description="where the advantage is below 0, the loss is at most that times it"
    )
    aggregation: AggregationName | None = Field(default=None, description=HOW_TO_AGGREGATE)


class GspoLoss(Config):
    """Clipped surrogate with one ratio per sequence; the mean over sequences."""

    type: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    clip_high: float = Field(default=4e-4, gt=0.0)
    aggregation: Literal["sequence"] | None = None


class CispoLoss(Config):
    """The ratio, bounded above, as a weight on the log-probability."""

    type: Literal["cispo"]
    clip_high: float = Field(default=0.28, gt=0.0, description="the weight is at most 1 + that")
    aggregation: AggregationName | None = Field(default=None, description=HOW_TO_AGGREGATE)


Loss = Annotated[PpoLoss | GspoLoss | CispoLoss, Field(discriminator="type"), _kind_if_none_is_named("ppo")]


class TisCorrection(Config):
    """min(w, cap) on each token; w = policy at the start of the Step / policy that sampled."""

    type: Literal["tis"]
    cap: float = Field(default=2.0, gt=0.0)


class _Range(Config):
    low: float
    high: float

    @model_validator(mode="after")
    def _is_a_range(self) -> _Range:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}: every token would be silenced")
        return self


class IcepopCorrection(_Range):
    """w where low <= w <= high, else the token is silenced."""

    type: Literal["icepop"]
    low: float = Field(default=0.5, ge=0.0)
    high: float = Field(default=5.0, gt=0.0)


class SeqTisCorrection(Config):
    """min(product of w over the sequence, cap) on each of its tokens."""

    type: Literal["seq_tis"]
    cap: float = Field(default=2.0, gt=0.0)


class SeqMaskCorrection(_Range):
    """w where the geometric mean of w over the sequence is in [low, high], else the sequence is silenced."""

    type: Literal["seq_mask"]
    low: float = Field(default=0.5, ge=0.0)
    high: float = Field(default=2.0, gt=0.0)


class DecoupledCorrection(Config):
    """w, without a bound."""

    type: Literal["decoupled"]


Correction = Annotated[
    TisCorrection | IcepopCorrection | SeqTisCorrection | SeqMaskCorrection | DecoupledCorrection,
    Field(discriminator="type"),
]


class KlConfig(Config):
    """KL to the frozen model of the reward service (reward.reference), added to the loss of each token."""

    coefficient: float = Field(gt=0.0)
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k2", description="k2: on policy the gradient of KL(policy||reference); k3: of KL(reference||policy)"
    )
    ratio_cap: float = Field(
        default=0.0,
        ge=0.0,
        description="off policy: each token weighs min(policy / what sampled it, that); 0: all weigh 1",
    )

    @field_validator("estimator")
    @classmethod
    def _has_a_gradient(cls, estimator: str) -> str:
        if estimator == "k1":
            raise ValueError("k1 as a loss has an expected gradient of 0; take k2 or k3")
        return estimator


class OverlongConfig(Config):
    """DAPO's soft penalty: a reward falls by up to `factor` over the last `buffer` tokens of sampling.max_tokens."""

    buffer: int = Field(ge=1, description="tokens")
    factor: float = Field(default=1.0, gt=0.0)


class AlgorithmConfig(Config):
    """From scores to the objective of a Step."""

    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoLoss()
    correction: Correction | None = Field(
        default=None, description="weights for the gap between engine and trainer; needed where policies are mixed"
    )
    ratio_to: Literal["start", "behavior"] = Field(
        default="start",
        description="policy that ratios are taken to: at the start of the Step, or the one that sampled",
    )
    kl: KlConfig | None = None
    entropy_coefficient: float = Field(default=0.0, description="above 0 rewards entropy")
    overlong: OverlongConfig | None = None
    truncated: Literal["keep", "penalise", "mask"] = Field(
        default="keep",
        description="answers cut at sampling.max_tokens: as others; with truncated_penalty taken from their reward; in "
        "no statistic and not trained",
    )
    truncated_penalty: float = Field(default=1.0, ge=0.0)
    epochs: int = Field(default=1, ge=1, description="passes over the Batch in one Step")
    mini_batches: int = Field(default=1, ge=1, description="Updates per pass")
    control: Literal["none", "shuffled_rewards"] = Field(
        default="none",
        description="for controlled experiments: shuffled_rewards hands the scores of a Batch around at random",
    )

    @property
    def aggregation(self) -> AggregationName:
        """How the losses of tokens become one number."""
        if self.loss.type == "gspo":
            return "sequence"
        return self.loss.aggregation or ("constant" if self.advantage.type == "dr_grpo" else "token")

    @model_validator(mode="after")
    def _fit(self) -> AlgorithmConfig:
        if self.advantage.type == "dr_grpo" and self.aggregation != "constant":
            raise ValueError(
                f"advantage 'dr_grpo' divides by a constant length, got the aggregation {self.aggregation!r} of loss "
                f"{self.loss.type!r}; leave loss.aggregation out, or take advantage grpo with norm_by_std: false"
            )
        if self.loss.type == "gspo" and getattr(self.advantage, "gamma", 1.0) != 1.0:
            raise ValueError("loss 'gspo' wants one advantage for all tokens of a sequence; set advantage.gamma to 1")
        if self.ratio_to == "behavior" and self.correction is not None:
            raise ValueError(
                f"ratio_to 'behavior' and correction {self.correction.type!r} would count the same gap twice; take one"
            )
        if self.truncated != "penalise" and self.truncated_penalty != 1.0:
            raise ValueError("truncated_penalty has no effect without truncated: penalise")
        return self


class FilterConfig(Config):
    """What becomes of a Step whose groups are filtered: further prompts are sampled, one for each that leaves."""

    most_extra_prompts: int | None = Field(
        default=None, ge=1, description="further prompts sampled for one Step at most; null: 4 x prompts_per_step"
    )
    when_exhausted: Literal["train", "fail"] = Field(
        default="train", description="a Step whose further prompts are used up: train on the groups it has, or fail"
    )


class SpreadFilter(FilterConfig):
    """Trains on groups whose scores differ; docs/math.md, Filters."""

    type: Literal["spread"]
    tolerance: float = Field(default=0.0, ge=0.0, description="highest - lowest score that still counts as equal")


class MeanFilter(FilterConfig):
    """Trains on groups whose mean score is inside an open interval; docs/math.md, Filters."""

    type: Literal["mean"]
    above: float = 0.0
    below: float = 1.0

    @model_validator(mode="after")
    def _is_an_interval(self) -> MeanFilter:
        if self.above >= self.below:
            raise ValueError(f"no mean is above {self.above} and below {self.below}")
        return self
