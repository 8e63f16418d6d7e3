"""Settings of the reward service: scorers, told apart by `type`, and the reference model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from services.common.config import Config
from services.reward.signature import signature_of

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


def _whole_number_as_text(value: Any) -> Any:
    """`version: 1` means "1"; a fraction is left to be refused, since YAML reads 1.10 as 1.1."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class _Scorer(Config):
    name: str = Field(pattern=NAME)
    version: Annotated[str | None, pydantic.BeforeValidator(_whole_number_as_text)] = Field(
        None,
        pattern=NAME,
        description="None: a short digest of what determines its scores, so that a change of it is another version",
    )


class _Sandboxed(_Scorer):
    """A function that is called in child processes which can be killed."""

    timeout_seconds: float = Field(10.0, gt=0, description="wall clock for one call; then the child is killed")
    memory_mib: int = Field(1024, ge=64, description="address space of each child process (RLIMIT_AS)")
    processes: int = Field(1, ge=1, description="children that score at the same time")
    start_seconds: float = Field(60.0, gt=0, description="for a child to start and import what it calls")


class FunctionScorer(_Sandboxed):
    """A Python function in a file of the user's; services/reward/functions.py says how it is called."""

    type: Literal["function"] = "function"
    path: Path = Field(description="the Python file")
    function: str = "score"
    arguments: dict[str, Any] = Field({}, description="further arguments of every call, by name; they win over columns")
    whole_groups: bool = Field(False, description="called once with all answers to a prompt, and answers a list")
    allow_network: bool = Field(False, description="let the function open sockets other than Unix ones")
    allow_processes: bool = Field(False, description="let the function start processes; they die with the child")

    @pydantic.model_validator(mode="after")
    def _names_are_free(self) -> FunctionScorer:
        taken = set(signature_of(whole_groups=self.whole_groups).names) & set(self.arguments)
        if taken:
            raise ValueError(f"arguments: {', '.join(sorted(taken))} is given by the service; name it otherwise")
        return self


class ExactMatchScorer(_Sandboxed):
    """1 where the answer is the reference, else 0; services/reward/builtin/exact_match.py."""

    type: Literal["exact_match"]
    strip: bool = Field(True, description="leave out white space at both ends")
    ignore_case: bool = False
    ignore_punctuation: bool = False
    squeeze_whitespace: bool = Field(False, description="any run of white space is one space")
    unicode_form: Literal["NFC", "NFKC"] | None = Field(None, description="compare in this Unicode normal form")


class NumberScorer(_Sandboxed):
    """1 where the number in the answer is that of the reference, else 0; services/reward/builtin/number.py."""

    type: Literal["number"]
    where: Literal["last", "boxed", "after_marker"] = Field(
        "last", description="the last number; the last in the last \\boxed{}; the first after the last marker"
    )
    marker: str | None = Field(None, min_length=1, description='for after_marker, such as "####"')
    absolute_tolerance: float = Field(0.0, ge=0.0)
    relative_tolerance: float = Field(0.0, ge=0.0, description="as a share of the reference's number")

    @pydantic.model_validator(mode="after")
    def _marker_where_it_is_used(self) -> NumberScorer:
        if (self.where == "after_marker") != (self.marker is not None):
            raise ValueError(f"where is {self.where!r} and marker {self.marker!r}; after_marker needs one, others none")
        return self


class RegexScorer(_Sandboxed):
    """1 where the answer matches, else 0; services/reward/builtin/regex.py."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, description="of Python's re; flags are written into it, such as (?s)")
    match: Literal["full", "first", "last"] = Field("full", description="the whole answer, or the first or last place")
    group: int | str | None = Field(None, description="a group of the pattern that must equal the reference as well")
    text: Literal["response", "response_raw"] = Field("response", description="raw: special tokens are kept")

    @pydantic.model_validator(mode="after")
    def _compiles(self) -> RegexScorer:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: {error}") from None
        groups: list[int | str] = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in groups:
            raise ValueError(f"group: the pattern has no group {self.group!r}; it has {groups}")
        return self


class LengthScorer(_Sandboxed):
    """From the length of the answer alone; services/reward/builtin/length.py."""

    type: Literal["length"]
    shape: Literal["overlong", "limit", "target"] = Field(
        description="overlong: 0 down to -factor in the last `buffer` before `limit`, and beyond; limit: 1 up to "
        "`limit`, else 0; target: 1 at `target`, falling to 0 at a distance of `width`"
    )
    unit: Literal["tokens", "characters"] = "tokens"
    limit: int | None = Field(None, ge=1)
    buffer: int | None = Field(None, ge=1)
    factor: float = Field(1.0, gt=0.0)
    target: int | None = Field(None, ge=0)
    width: int | None = Field(None, ge=1)

    @pydantic.model_validator(mode="after")
    def _numbers_of_the_shape(self) -> LengthScorer:
        needed = {"overlong": {"limit", "buffer"}, "limit": {"limit"}, "target": {"target", "width"}}[self.shape]
        given = {name for name in ("limit", "buffer", "target", "width") if getattr(self, name) is not None}
        if given != needed:
            raise ValueError(f"shape {self.shape} takes {sorted(needed)}, got {sorted(given)}")
        if self.buffer is not None and self.limit is not None and self.buffer > self.limit:
            raise ValueError(f"buffer {self.buffer} is longer than limit {self.limit}; at most {self.limit}")
        return self


class MathScorer(_Sandboxed):
    """1 where the answer equals the reference as mathematics, else 0; services/reward/builtin/math_equivalence.py."""

    type: Literal["math"]
    decimals: int = Field(6, ge=0, le=15, description="decimal places that numbers are compared to")
    strict: bool = Field(True, description="variables must have the same names, and a set is no tuple")


class JsonSchemaScorer(_Sandboxed):
    """1 where the answer is JSON that fits a schema, else 0; services/reward/builtin/json_schema.py."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(None, description="None: the reference of each row is its schema")
    where: Literal["whole", "fenced"] = Field("whole", description="fenced: the last block between ``` lines")


class CompositeScorer(_Scorer):
    """The weighted sum of other scorers of this worker; services/reward/composite.py."""

    type: Literal["composite"]
    parts: dict[str, float] = Field(min_length=1, description="weight of each other scorer, by its name")

    @pydantic.model_validator(mode="after")
    def _weights_matter(self) -> CompositeScorer:
        idle = [name for name, weight in self.parts.items() if weight == 0.0]
        if idle:
            raise ValueError(f"parts: {', '.join(idle)} has weight 0 and adds nothing; leave it out")
        return self


BuiltinScorer = ExactMatchScorer | NumberScorer | RegexScorer | LengthScorer | MathScorer | JsonSchemaScorer


def _function_unless_said(value: Any) -> Any:
    return {"type": "function", **value} if isinstance(value, dict) else value


AnyScorer = Annotated[
    Annotated[FunctionScorer | BuiltinScorer | CompositeScorer, Field(discriminator="type")],
    pydantic.BeforeValidator(_function_unless_said),
]


class ReferenceConfig(Config):
    """The frozen model whose log-probabilities this worker computes; services/reward/reference.py."""

    path: str | None = Field(None, description="Hugging Face folder; null: the model that the run starts from")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="of its weights; null: that of the run")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    micro_batch_tokens: int = Field(8192, ge=1, description="tokens of one forward pass, padding counted")
    max_sequence_tokens: int | None = Field(None, ge=1, description="null: what the model's own settings say")
    threads: int | None = Field(None, ge=1, description="on the CPU; null: all cores")
    start_seconds: float = Field(600.0, gt=0, description="by then the model is loaded")
    batch_seconds: float = Field(300.0, gt=0, description="for one forward pass; then its process is ended")


class RewardConfig(Config):
    """What this worker can score with."""

    scorers: tuple[AnyScorer, ...] = ()
    reference: ReferenceConfig | None = None

    @property
    def files(self) -> dict[str, Path]:
        """The user's Python files, by the key that names each."""
        functions = {n: scorer for n, scorer in enumerate(self.scorers) if isinstance(scorer, FunctionScorer)}
        return {f"scorers.{number}.path": scorer.path for number, scorer in functions.items()}

    @pydantic.model_validator(mode="after")
    def _something_to_do(self) -> RewardConfig:
        if not self.scorers and self.reference is None:
            raise ValueError("needs scorers or a reference; this worker would answer nothing")
        return self

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> RewardConfig:
        seen: set[tuple[str, str | None]] = set()
        for scorer in self.scorers:
            key = (scorer.name, scorer.version)
            if key in seen:
                raise ValueError(f"scorer {scorer.name!r} is listed twice with version {scorer.version!r}")
            seen.add(key)
        return self

    @pydantic.model_validator(mode="after")
    def _parts_are_there(self) -> RewardConfig:
        simple = [scorer.name for scorer in self.scorers if not isinstance(scorer, CompositeScorer)]
        for scorer in self.scorers:
            for part in scorer.parts if isinstance(scorer, CompositeScorer) else ():
                if simple.count(part) != 1:
                    problem = "there is none" if part not in simple else "it has several versions"
                    known = ", ".join(name for name in simple if simple.count(name) == 1) or "none"
                    raise ValueError(f"scorer {scorer.name!r}: part {part!r}: {problem}; parts can be: {known}")
        return self
