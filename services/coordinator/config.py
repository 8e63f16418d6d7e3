"""Settings of a run: data, sampling, algorithm, evaluation, publication, deadlines. Sizes are checked here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from services.common.config import Config
from services.common.errors import ConfigError
from services.coordinator import sources
from services.coordinator.algorithm_settings import AlgorithmConfig, MeanFilter, SpreadFilter

NAME = r"^[a-z0-9][a-z0-9_-]*$"
"""Of a data set: it stands in ids and in names of files."""
FOUND = "auto"
"""A column that is found by the names that others use."""
RESERVED_NAMES = ("self-check",)
"""Data sets of our own (services/coordinator/selfcheck.py)."""
TEMPLATE_INPUTS = ("messages", "tools", "documents", "add_generation_prompt")
"""What a chat template is always given."""


def is_template(text: str) -> bool:
    """Whether data.template is a template itself, and not the path of one."""
    return "{{" in text or "{%" in text


class ColumnsConfig(Config):
    """Which column is what. auto: by the names that others use; what was found is told, ambiguity is refused."""

    prompt: str = Field(
        default=FOUND,
        description="auto: prompt, else the one of question, problem, messages, conversations, instruction (+ input), "
        "input that is there; a.b is b inside of a",
    )
    reference: str | None = Field(
        default=FOUND,
        description="what a grader needs. auto: reference, else the one of answer, solution, ground_truth, label, "
        "reward_model.ground_truth, reward_spec.ground_truth that is there; null: no row has one",
    )
    system: str | None = Field(
        default=FOUND, description="a row's own system prompt. auto: system or system_prompt, if there; null: none"
    )
    tools: str | None = Field(
        default=FOUND, description="tools that the chat template describes. auto: tools, if there; null: none"
    )


class SourceConfig(Config):
    """One data set."""

    path: str | tuple[str, ...] | None = Field(
        default=None,
        description="a file, several, a folder, a pattern (data/*.parquet), or a name on the Hugging Face Hub "
        "(owner/name:split)",
    )
    name: str | None = Field(default=None, pattern=NAME, description="in ids; null: by its path")
    kind: Literal["auto", "jsonl", "json", "csv", "parquet", "arrow", "hub"] = Field(
        default="auto", description="auto: by name and first bytes; arrow: what `datasets` saves to disk"
    )
    split: str | None = Field(default=None, description="of a folder that has several, or on the Hub")
    subset: str | None = Field(default=None, description="a configuration of a data set on the Hub")
    revision: str | None = Field(default=None, description="commit of a data set on the Hub")
    columns: ColumnsConfig = ColumnsConfig()
    answer_regex: str | None = Field(
        default=None,
        description="the reference is its last match in the column, or the match's first group; e.g. '#### (.+)'",
    )

    @field_validator("path")
    @classmethod
    def _names_something(cls, path: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if path is not None and (not path or not all(path)):
            raise ValueError("expected a path, or a list of paths")
        return path

    @field_validator("answer_regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _hub_only(self) -> SourceConfig:
        on_hub = self.kind == "hub" or any(path.startswith(sources.HUB) for path in self.paths)
        for key in ("subset", "revision"):
            if self.path is not None and getattr(self, key) is not None and not on_hub:
                raise ValueError(f"{key} is for a name on the Hub ({sources.HUB}owner/name)")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @property
    def called(self) -> str:
        """Its name, else what its path suggests."""
        if self.name is not None:
            return self.name
        stem = Path(self.paths[0].removeprefix(sources.HUB).partition(":")[0]).stem
        return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_") or "data"

    @staticmethod
    def absolute(path: str, directory: Path, kind: str) -> str:
        """The path from `directory`; a name on the Hub as hf://name, which means the same from anywhere."""
        return sources.absolute(path, directory, kind)

    def locate(self) -> sources.Located:
        """Its files. Raises ConfigError that says what is there instead."""
        return sources.locate(self.paths, self.kind, self.split)


class WeightedSource(SourceConfig):
    """One data set of several."""

    weight: float = Field(default=1.0, gt=0.0, description="its share of the prompts, relative to the others")


class DataConfig(SourceConfig):
    """Where prompts come from, one data set or several, and what becomes of them."""

    name: str | None = Field(default="train", pattern=NAME)
    sources: tuple[WeightedSource, ...] = Field(
        default=(), description="several data sets, in place of path: visited in proportion to their weights"
    )
    shuffle: bool = Field(default=True, description="another order in each epoch, from the run's seed")
    format: Literal["chat", "text"] = Field(default="chat", description="chat: rendered by a chat template")
    template: str | None = Field(
        default=None, description="chat: a chat template, as a file or as itself; null: the model's own"
    )
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="chat: variables of the template")
    system_prompt: str | None = Field(default=None, description="chat: for conversations that have none of their own")
    input_template: str | None = Field(
        default=None, description="text: what stands around a prompt, which replaces its {}; e.g. 'Q: {}\\nA:'"
    )
    add_special_tokens: bool = Field(
        default=True, description="text: what the tokenizer puts around a sequence; false: nothing"
    )
    max_prompt_tokens: int = Field(default=1024, ge=1, description="of the prompt as the model sees it; never cut")
    overlong: Literal["fail", "skip"] = Field(default="fail", description="what becomes of a longer prompt")
    bad_rows: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="share of a data set's rows that may be bad and are left out, by name"
    )

    def own_template(self) -> str | None:
        """The text of the chat template in place of the model's; None: there is none. Raises ConfigError."""
        if self.template is None or is_template(self.template):
            return self.template
        try:
            return Path(self.template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.template: {self.template}: cannot be read: {error}") from None

    @property
    def all_sources(self) -> tuple[WeightedSource, ...]:
        if self.sources:
            return self.sources
        own = {key: getattr(self, key) for key in SourceConfig.model_fields}
        return (WeightedSource(**own),)

    @model_validator(mode="after")
    def _one_or_several(self) -> DataConfig:
        _refuse_both(self, "sources")
        _refuse_same_names(source.called for source in self.all_sources)
        return self

    @model_validator(mode="after")
    def _options_of_the_format(self) -> DataConfig:
        other = {
            "chat": ("input_template", "add_special_tokens"),
            "text": ("template", "chat_template_kwargs", "system_prompt"),
        }
        for key in other[self.format]:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with format: {self.format}; take it out, or change the format")
        if self.input_template is not None and self.input_template.count("{}") != 1:
            raise ValueError(f"input_template: expected one {{}}, where the prompt goes, in {self.input_template!r}")
        taken = [key for key in self.chat_template_kwargs if key in TEMPLATE_INPUTS]
        if taken:
            raise ValueError(f"chat_template_kwargs: {', '.join(taken)} is given to every template; take it out")
        return self


class SamplingConfig(Config):
    """How training samples; nothing else (a model folder's defaults) has a say."""

    temperature: float = Field(default=1.0, gt=0.0, description="the trainer divides its logits by the same")
    max_tokens: int = Field(ge=1, description="most tokens sampled per trajectory")


class HeldoutSource(SourceConfig):
    """One data set of held-out prompts. Without columns of its own it has those of `data`, if that is one data set."""

    columns: ColumnsConfig | None = None  # type: ignore[assignment]


class EvaluationConfig(HeldoutSource):
    """Answers to held-out prompts, greedy unless told otherwise, by one policy version. Rows are as `data` says."""

    name: str | None = Field(default="evaluation", pattern=NAME, description="data set, in ids and files")
    sources: tuple[HeldoutSource, ...] = Field(default=(), description="several data sets, in place of path")
    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at start and end")
    at_start: bool = True
    at_end: bool = True
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0.0, description="0: greedy")
    samples: int = Field(default=1, ge=1, description="answers to each prompt; more than one needs a temperature")

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"samples: {self.samples} greedy answers to a prompt are all the same; set temperature above 0, or "
                "samples to 1"
            )
        return self

    def all_sources(self, data: DataConfig) -> tuple[SourceConfig, ...]:
        """The data sets, each with its columns."""
        own = self.sources or (self,)
        return tuple(_with_columns(source, data) for source in own)

    @model_validator(mode="after")
    def _one_or_several(self) -> EvaluationConfig:
        _refuse_both(self, "sources")
        _refuse_same_names(source.called for source in self.sources or (self,))
        return self


def _with_columns(source: HeldoutSource, data: DataConfig) -> SourceConfig:
    own = {key: getattr(source, key) for key in SourceConfig.model_fields}
    if source.columns is None:
        own["columns"] = ColumnsConfig() if data.sources else data.columns
        if source.answer_regex is None and not data.sources:
            own["answer_regex"] = data.answer_regex
    return SourceConfig(**own)


def _refuse_both(config: DataConfig | EvaluationConfig, key: str) -> None:
    """One data set or several; what belongs to a data set is not beside a list of them, where it would be ignored."""
    several = getattr(config, key)
    if not several and config.path is None:
        raise ValueError(f"expected path, for one data set, or {key}, for several")
    fields = type(config).model_fields
    given = [name for name in SourceConfig.model_fields if getattr(config, name) != fields[name].default]
    if several and given:
        raise ValueError(f"{', '.join(given)} beside {key}: put it into the items of {key}")
    for number, source in enumerate(several):
        if source.path is None:
            raise ValueError(f"{key}.{number}.path: expected a path")


def _refuse_same_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two data sets are called {name!r}, and a prompt's id begins with that; set their name")
        if name in RESERVED_NAMES:
            raise ValueError(f"{name!r} is the name of a data set of our own; set another name")
        seen.add(name)


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


class CheckpointConfig(Config):
    """What a run can be taken up from without replaying all of it. In <run folder>/checkpoints."""

    every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: none but at a stop")
    at_stop: bool = Field(
        default=True, description="one when the run is stopped, if it is written in time (stop_seconds)"
    )
    keep_last: int = Field(default=2, ge=1, description="newest that are kept")
    keep_best: int = Field(default=1, ge=0, description="best by mean held-out score that are kept beside them")
    seconds: float = Field(default=600.0, gt=0.0, description="for one to be written, or loaded")


class TensorBoardSink(Config):
    """Event files in <run folder>/tensorboard."""

    library: ClassVar[str] = "tensorboard"
    type: Literal["tensorboard"]


class WandbSink(Config):
    """Weights & Biases; what it needs to know beside comes from its own variables (WANDB_API_KEY, WANDB_MODE, …)."""

    library: ClassVar[str] = "wandb"
    type: Literal["wandb"]
    project: str = Field(default="antiphon", min_length=1)


class TrackioSink(Config):
    """trackio, on this machine or on a server of one's own (TRACKIO_SERVER_URL)."""

    library: ClassVar[str] = "trackio"
    type: Literal["trackio"]
    project: str = Field(default="antiphon", min_length=1)


SinkConfig = TensorBoardSink | WandbSink | TrackioSink


class CoordinatorConfig(Config):
    """One run."""

    steps: int = Field(ge=1)
    schedule: Literal["sync"] = "sync"
    data: DataConfig
    sampling: SamplingConfig
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    filter: Annotated[SpreadFilter | MeanFilter, Field(discriminator="type")] | None = Field(
        default=None, description="groups that are sampled and not trained; null: none"
    )
    scorer: str = Field(description="name, or name@version, of a scorer of the reward service")
    failure_budget: float = Field(default=0.2, ge=0.0, le=1.0, description="share of a Batch that may go unscored")
    score_tries: int = Field(default=3, ge=1, description="times a group is sent to be scored when the machinery fails")
    evaluation: EvaluationConfig | None = None
    publication: PublicationConfig = PublicationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sinks: tuple[Annotated[SinkConfig, Field(discriminator="type")], ...] = Field(
        default=(), description="where metrics go beside metrics.jsonl: tensorboard, wandb, trackio"
    )
    self_check: SelfCheckConfig = SelfCheckConfig()
    warm_up: bool = Field(
        default=True, description="before the first Step, one without effect on the longest rows that may come up"
    )
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
    replacement_seconds: float = Field(
        default=600.0,
        ge=0.0,
        description="a service that died is waited for so long; 0: not at all, what it did fails",
    )
    stop_seconds: float = Field(
        default=8.0,
        gt=0.0,
        description="a stop waits so long for a Step or publication, and as long again for checkpoint and export",
    )

    @property
    def stop_bound_seconds(self) -> float:
        """From the wish to stop to RunEnded."""
        return 2 * self.stop_seconds

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def most_prompts_per_step(self) -> int:
        """Prompts that are sampled for one Step at most, those that a filter takes out included."""
        if self.filter is None:
            return self.prompts_per_step
        extra = self.filter.most_extra_prompts
        return self.prompts_per_step + (4 * self.prompts_per_step if extra is None else extra)

    @property
    def planned_updates(self) -> int:
        """Optimizer updates of the whole run: what a learning-rate schedule counts."""
        return self.steps * self.algorithm.epochs * self.algorithm.mini_batches

    @field_validator("sinks", mode="before")
    @classmethod
    def _by_name(cls, sinks: Any) -> Any:
        """The name of a sink alone means that sink with nothing set."""
        if not isinstance(sinks, list | tuple):
            return sinks
        return [{"type": sink} if isinstance(sink, str) else sink for sink in sinks]

    @field_validator("sinks")
    @classmethod
    def _one_of_each(cls, sinks: tuple[SinkConfig, ...]) -> tuple[SinkConfig, ...]:
        kinds = [sink.type for sink in sinks]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"{', '.join(twice)} is there twice; name each sink once")
        return sinks

    @model_validator(mode="after")
    def _data_sets_have_names(self) -> CoordinatorConfig:
        if self.evaluation is not None:
            heldout = [source.called for source in self.evaluation.all_sources(self.data)]
            _refuse_same_names([*(source.called for source in self.data.all_sources), *heldout])
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> CoordinatorConfig:
        if self.filter is not None and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, and filter {self.filter.type!r} looks at how the "
                "samples of one prompt differ: it would leave nothing to train on; take 2 or more, or no filter"
            )
        if self.samples_per_prompt < 2 and self.algorithm.advantage.compares:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, and advantage {self.algorithm.advantage.type!r} "
                "compares the samples of one prompt with each other: every advantage would be 0; take 2 or more, or "
                "advantage 'reinforce'"
            )
        if self.algorithm.overlong is not None and self.algorithm.overlong.buffer > self.sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer {self.algorithm.overlong.buffer} > sampling.max_tokens "
                f"{self.sampling.max_tokens}: every answer would be too long; take 1 to {self.sampling.max_tokens}"
            )
        if self.algorithm.mini_batches > self.trajectories_per_step:
            raise ValueError(
                f"mini_batches {self.algorithm.mini_batches} > prompts_per_step {self.prompts_per_step} x "
                f"samples_per_prompt {self.samples_per_prompt} = {self.trajectories_per_step} trajectories: some "
                f"would be empty; take 1 to {self.trajectories_per_step}"
            )
        return self


class AnswersConfig(CoordinatorConfig):
    """Answers to held-out prompts and nothing else: no Step (services/coordinator/answers.py)."""

    score: bool = Field(description="false: nobody scores the answers, and no reward worker is waited for")
