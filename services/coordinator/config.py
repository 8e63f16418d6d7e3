"""Settings of a run: data, sampling, algorithm, evaluation, publication, deadlines. Sizes are checked here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.common.config import Config


class DataConfig(Config):
    """Where prompts come from."""

    path: str = Field(description="JSON Lines file, one row per line")
    prompt_column: str = Field(default="prompt", description="a string, or for chat a list of {role, content}")
    reference_column: str | None = Field(default="reference", description="what a grader needs; null: no row has one")
    format: Literal["chat", "text"] = Field(default="chat", description="chat: rendered by the model's chat template")
    shuffle: bool = Field(default=True, description="another order in each epoch, from the run's seed")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="a longer prompt is refused, never cut")


class SamplingConfig(Config):
    """How training samples; nothing else (a model folder's defaults) has a say."""

    temperature: float = Field(default=1.0, gt=0.0, description="the trainer divides its logits by the same")
    max_tokens: int = Field(ge=1, description="most tokens sampled per trajectory")


class GrpoAdvantage(Config):
    """(R - mean of the group) / (std of the group + 1e-6); docs/math.md, Advantages."""

    type: Literal["grpo"] = "grpo"
    norm_by_std: bool = Field(default=True, description="false drops the division")


class PpoLoss(Config):
    """Clipped surrogate; docs/math.md, Policy loss."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    aggregation: Literal["token"] = "token"


class AlgorithmConfig(Config):
    """From scores to the objective of a Step."""

    advantage: GrpoAdvantage = GrpoAdvantage()
    loss: PpoLoss = PpoLoss()
    epochs: int = Field(default=1, ge=1, description="passes over the Batch in one Step")
    mini_batches: int = Field(default=1, ge=1, description="Updates per pass")
    control: Literal["none", "shuffled_rewards"] = Field(
        default="none",
        description="for controlled experiments: shuffled_rewards hands the scores of a Batch around at random",
    )


class EvaluationConfig(Config):
    """Greedy answers to held-out prompts, pinned to one policy version. Columns and format are those of `data`."""

    path: str
    name: str = Field(default="evaluation", pattern=r"^[a-z0-9][a-z0-9_-]*$", description="data set, in ids and files")
    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at start and end")
    at_start: bool = True
    at_end: bool = True
    max_tokens: int = Field(ge=1)


class PublicationConfig(Config):
    """How a policy travels to the engines."""

    transport: Literal["auto", "gloo", "nccl", "cuda_ipc"] = Field(
        default="auto", description="auto: gloo on CPU, CUDA IPC where learner and engine share a GPU, else NCCL"
    )
    bucket_mib: int = Field(default=64, ge=1, description="two at each end; 256 and more for large models on GPUs")
    deadline_seconds: float = Field(default=120.0, gt=0.0)
    probe_tolerance: float | None = Field(
        default=None,
        gt=0.0,
        description="largest mean |log-prob difference| of the probe; null: 1e-3 in fp32, 0.2 in bf16",
    )


class SelfCheckConfig(Config):
    """What must agree between coordinator, engine and trainer before the first Step."""

    prompts: int = Field(default=4, ge=1, description="prompts generated and recomputed")
    max_tokens: int = Field(default=32, ge=1, description="most tokens sampled for each")
    logprob_tolerance_float32: float = Field(default=1e-4, gt=0.0, description="largest mean |log-prob difference|")
    logprob_tolerance_bfloat16: float = Field(default=0.06, gt=0.0)
    ratio_tolerance: float = Field(default=0.02, gt=0.0, description="largest distance of the mean ratio from 1")


class CoordinatorConfig(Config):
    """One run."""

    steps: int = Field(ge=1)
    schedule: Literal["sync"] = "sync"
    data: DataConfig
    sampling: SamplingConfig
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    scorer: str = Field(description="name, or name@version, of a scorer of the reward service")
    failure_budget: float = Field(default=0.2, ge=0.0, le=1.0, description="share of a Batch that may go unscored")
    score_tries: int = Field(default=3, ge=1, description="times a group is sent to be scored when the machinery fails")
    evaluation: EvaluationConfig | None = None
    publication: PublicationConfig = PublicationConfig()
    self_check: SelfCheckConfig = SelfCheckConfig()
    export: bool = Field(default=True, description="write the last policy as a Hugging Face folder at the end")
    rollout_workers: int = Field(default=1, ge=1, description="engines waited for at start")
    reward_workers: int = Field(default=1, ge=1)
    calls_per_worker: int = Field(default=128, ge=1, le=1024, description="calls under way at one worker at a time")
    start_seconds: float = Field(default=300.0, gt=0.0, description="until every worker is up")
    check_seconds: float = Field(default=300.0, gt=0.0)
    generate_seconds: float = Field(default=900.0, gt=0.0, description="for the prompts of one Step")
    score_seconds: float = Field(default=600.0, gt=0.0, description="from the last answer of a Step to its last score")
    train_seconds: float = Field(default=3600.0, gt=0.0)
    evaluate_seconds: float = Field(default=3600.0, gt=0.0)
    export_seconds: float = Field(default=600.0, gt=0.0)
    stop_seconds: float = Field(default=10.0, gt=0.0, description="a stop waits so long for a Step or publication")

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def planned_updates(self) -> int:
        """Optimizer updates of the whole run: what a learning-rate schedule counts."""
        return self.steps * self.algorithm.epochs * self.algorithm.mini_batches

    @model_validator(mode="after")
    def _sizes_fit(self) -> CoordinatorConfig:
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, and advantage {self.algorithm.advantage.type!r} "
                "compares the samples of one prompt with each other: every advantage would be 0; take 2 or more"
            )
        if self.algorithm.mini_batches > self.trajectories_per_step:
            raise ValueError(
                f"mini_batches {self.algorithm.mini_batches} > prompts_per_step {self.prompts_per_step} x "
                f"samples_per_prompt {self.samples_per_prompt} = {self.trajectories_per_step} trajectories: some "
                f"would be empty; take 1 to {self.trajectories_per_step}"
            )
        return self
