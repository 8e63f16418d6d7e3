"""Settings of a learner. Imports no heavy library."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from services.common.config import Config

Fraction = Annotated[float, pydantic.Field(ge=0.0, lt=1.0)]


class OptimizerConfig(Config):
    """AdamW and its learning rate, which is counted in Updates (docs/math.md, "Optimizer schedule")."""

    learning_rate: float = pydantic.Field(1e-6, ge=0.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: float = pydantic.Field(1e-8, gt=0.0)
    weight_decay: float = pydantic.Field(0.0, ge=0.0, description="on matrices; never on vectors (norms, biases)")
    max_gradient_norm: float = pydantic.Field(1.0, gt=0.0, description="global norm that gradients are clipped to")
    warmup_updates: int = pydantic.Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int | None = pydantic.Field(None, ge=1, description="where a falling schedule ends; it needs one")
    minimum_ratio: float = pydantic.Field(0.1, ge=0.0, le=1.0, description="of the learning rate, at the end")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f"schedule {self.schedule!r} falls towards an end: set total_updates")
        if self.total_updates is not None and self.warmup_updates > self.total_updates:
            raise ValueError(
                f"warmup_updates = {self.warmup_updates} is longer than the run, total_updates = {self.total_updates}; "
                f"at most {self.total_updates}"
            )
        return self


class LearnerConfig(Config):
    """How one model is trained."""

    role: Literal["actor"] = "actor"
    ranks: int = pydantic.Field(1, ge=1, description="processes that share the model by ZeRO-3")
    gpus: tuple[int, ...] | None = pydantic.Field(
        None, description="GPUs of the host that the launcher gives to the ranks, one to each; none: all"
    )
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({})
    micro_batch_tokens: int = pydantic.Field(
        4096,
        ge=1,
        description="tokens of one forward and backward pass of a rank, padding counted; memory grows with it",
    )
    gradient_checkpointing: bool = pydantic.Field(False, description="recompute activations: less memory, slower")
    threads_per_rank: int | None = pydantic.Field(None, ge=1, description="default: the cores divided by the ranks")
    start_seconds: float = pydantic.Field(600.0, gt=0, description="by then every rank has loaded the model")
    rank_silence_seconds: float = pydantic.Field(
        300.0, gt=0, description="ranks that work and say nothing for so long are taken for dead"
    )
    save_grace_seconds: float = pydantic.Field(
        5.0, ge=0, description="a stop waits so long for a checkpoint that is being written"
    )
    failed_linger_seconds: float = pydantic.Field(
        15.0, ge=0, description="after a rank is lost the service answers, with the cause, for so long; then it ends"
    )
