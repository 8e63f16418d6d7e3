"""Configuration: one YAML tree, closed and frozen models, dotted overrides. Imports no heavy library.

A recipe is read by services/cli; each process gets a file of its own, a `ProcessConfig`, with its part.
"""

from __future__ import annotations

import difflib
import re
import socket
import types
import typing
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pydantic
import yaml

from services.common.errors import ConfigError


class Config(pydantic.BaseModel):
    """Base of every configuration model: unknown keys are errors, values do not change after reading."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Config):
    """The model that a process works with."""

    path: str = pydantic.Field(description="Hugging Face folder: weights, config.json, tokenizer.json")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class ServiceConfig(Config):
    """What every service process needs to know of its run; filled in by whoever launches it."""

    run_id: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    worker_id: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    run_dir: Path
    nats_url: str
    nats_monitor_url: str | None = pydantic.Field(default=None, description="HTTP monitor, to assert its settings")
    host: str = pydantic.Field(default="127.0.0.1", description="address to bind; loopback unless told otherwise")
    port: int = pydantic.Field(default=0, description="0 picks a free port, which is announced")
    instance_id: str = pydantic.Field(
        default_factory=lambda: uuid.uuid4().hex, description="of this life of the worker; new at each start"
    )
    node: str = pydantic.Field(default_factory=socket.gethostname, description="host whose GPUs it uses")
    shares_gpus: bool = pydantic.Field(
        default=False, description="others use its GPUs too: it touches them only under a grant (docs/design.md §7)"
    )
    seed: int = pydantic.Field(default=0, description="seed of the run: everything random is derived from it")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


Settings = TypeVar("Settings", bound=Config)


class ProcessConfig(Config, Generic[Settings]):
    """The file a service process is started with: `python -m services.X --config FILE`."""

    service: ServiceConfig
    model: ModelConfig
    settings: Settings


Model = TypeVar("Model", bound=Config)


class _Rules:
    """What a plain word means: YAML 1.2's core schema. The library's own, YAML 1.1, reads 1e-6 as text, `no` as false
    and 1:30 as ninety.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[Any, Any]] = {}

    @classmethod
    def means(cls, tag: str, pattern: str, first: str) -> None:
        for character in first:
            rule = (f"tag:yaml.org,2002:{tag}", re.compile(pattern))
            cls.yaml_implicit_resolvers.setdefault(character, []).append(rule)


_Rules.means("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Rules.yaml_implicit_resolvers[""] = _Rules.yaml_implicit_resolvers["~"]
_Rules.means("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_Rules.means("int", r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$", "-+0123456789")
_Rules.means("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_Rules.means("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.")


class _Loader(_Rules, yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the library, but a key given twice is an error: one of the two would be ignored."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key {key.value!r} given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Decimal, leading zeros or not, and hexadecimal."""
        text = self.construct_scalar(node)
        return int(text, 16 if text.startswith("0x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


UNICODE_BREAKS = "\x85\u2028\u2029"


class _Dumper(_Rules, yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes everything out where it stands."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escapes the line breaks of Unicode, which are folded into a space when they stand as they are."""
        style = '"' if any(mark in data for mark in UNICODE_BREAKS) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def read_yaml(path: Path) -> dict[str, Any]:
    """The tree in a YAML file. Raises ConfigError when there is none or it is not a mapping."""
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(tree).__name__}")
    return tree


def override(tree: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """A copy of the tree with `a.b.c=value` applied in order; values are YAML, list items are addressed by number.

    Sections on the way that are missing or null are made.
    """
    result: dict[str, Any] = _copied(tree)
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        keys = dotted.split(".")
        if not separator or not all(keys):
            raise ConfigError(f"override {assignment!r}: expected key.path=value")
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {assignment!r}: the value is not YAML: {error}") from None
        node: Any = result
        for depth, key in enumerate(keys[:-1]):
            at = _index(node, key, dotted) if isinstance(node, list) else key
            if isinstance(node, dict) and node.get(at) is None:
                node[at] = {}
            node = node[at]
            if not isinstance(node, dict | list):
                raise ConfigError(f"override {assignment!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node[_index(node, keys[-1], dotted) if isinstance(node, list) else keys[-1]] = value
    return result


def parse(model: type[Model], tree: dict[str, Any], source: str) -> Model:
    """The checked configuration. Raises ConfigError that lists every problem; an unknown key gets the nearest name."""
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as error:
        lines = [_explain(model, problem) for problem in error.errors()]
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s)", *(f"  {line}" for line in lines)])) from None


def load_process_config(settings: type[Settings], path: Path) -> ProcessConfig[Settings]:
    """Reads the file a service process was started with."""
    return parse(ProcessConfig[settings], read_yaml(path), str(path))  # type: ignore[valid-type]


def dump(config: Config) -> str:
    """The configuration as YAML that reads back to the same."""
    text: str = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _explain(model: type[Config], problem: Any) -> str:
    shown, known = _walked(model, problem["loc"])
    where = ".".join(shown) or "(top)"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(shown[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
        return f"{where}: unknown key; {hint}"
    if problem["type"] == "union_tag_not_found":
        return f"{where}: lacks the key {problem['ctx']['discriminator']}, which says which kind of it is meant"
    got = problem["input"]
    if problem["type"] == "missing" or isinstance(got, dict | Config):  # then the input is the whole section
        return f"{where}: {problem['msg']}"
    text = repr(got)
    return f"{where}: {problem['msg']} (got {text if len(text) <= 80 else text[:77] + '...'})"


def _walked(model: type[Config], location: Sequence[str | int]) -> tuple[list[str], list[str]]:
    """A location as the user wrote it, and the names of the keys that are known beside its last one.

    Where a section has several variants, pydantic puts the variant's tag or class name into the location.
    """
    options: list[Any] = [model]
    beside: list[str] = []
    shown: list[str] = []
    for key in location:
        variants = [option for option in options if _is_model(option) and _called(option, key)]
        if len(options) > 1 and variants:
            options = variants
            continue
        models = [option for option in options if _is_model(option)]
        beside = [name for option in models for name in option.model_fields]
        shown.append(str(key))
        options = [inner for option in options for inner in _step(option, key)]
    return shown, beside


def _step(option: Any, key: str | int) -> list[Any]:
    """What may stand under a key of an annotation."""
    if _is_model(option):
        return _alternatives(option.model_fields[key].annotation) if key in option.model_fields else []
    arguments = typing.get_args(option)
    if not arguments or not isinstance(typing.get_origin(option), type):
        return []
    if issubclass(typing.get_origin(option), Mapping):
        return _alternatives(arguments[1])
    return [inner for argument in arguments for inner in _alternatives(argument)]


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated around them; anything else is its own alternative."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin is typing.Union or isinstance(annotation, types.UnionType):
        parts = [inner for part in typing.get_args(annotation) for inner in _alternatives(part)]
        return [part for part in parts if part is not type(None)]
    return [annotation]


def _is_model(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, pydantic.BaseModel)


def _called(model: type[pydantic.BaseModel], key: str | int) -> bool:
    """Whether a location names this variant: by the class, or by one of the words that tell variants apart."""
    return key == model.__name__ or any(
        key in typing.get_args(field.annotation)
        for field in model.model_fields.values()
        if typing.get_origin(field.annotation) is Literal
    )


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_copied(value) for value in node]
    return node


def _index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"override {dotted}: {key!r} is not an index of a list of {len(node)}")
    return int(key)
