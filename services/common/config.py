"""Configuration: one YAML tree, closed and frozen models, dotted overrides. Imports no heavy library.

A recipe is read by services/cli; each process gets a file of its own, a `ProcessConfig`, with its part.
"""

from __future__ import annotations

import difflib
import types
import typing
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pydantic
import yaml

from services.common.errors import ConfigError


class Config(pydantic.BaseModel):
    """Base of every configuration model: unknown keys are errors, values do not change after reading."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
    nats_monitor_url: str | None = pydantic.Field(None, description="HTTP monitor of the server, to assert its settings")
    host: str = pydantic.Field("127.0.0.1", description="address to bind; loopback unless told otherwise")
    port: int = pydantic.Field(0, description="0 picks a free port, which is announced")
    seed: int = pydantic.Field(0, description="seed of the run: everything random is derived from it")
    log_level: str = "INFO"


Settings = TypeVar("Settings", bound=Config)


class ProcessConfig(Config, Generic[Settings]):
    """The file a service process is started with: `python -m services.X --config FILE`."""

    service: ServiceConfig
    model: ModelConfig
    settings: Settings


Model = TypeVar("Model", bound=Config)


def read_yaml(path: Path) -> dict[str, Any]:
    """The tree in a YAML file. Raises ConfigError when there is none or it is not a mapping."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(tree).__name__}")
    return tree


def override(tree: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """A copy of the tree with `a.b.c=value` applied in order; values are YAML, list items are addressed by number."""
    result = _copied(tree)
    for assignment in assignments:
        dotted, separator, text = assignment.partition("=")
        if not separator or not dotted:
            raise ConfigError(f"override {assignment!r}: expected key.path=value")
        *parents, last = dotted.split(".")
        node: Any = result
        for depth, key in enumerate(parents):
            if isinstance(node, list):
                node = node[_index(node, key, dotted)]
            else:
                node = node.setdefault(key, {})
            if not isinstance(node, dict | list):
                raise ConfigError(f"override {assignment!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        value = yaml.safe_load(text)
        if isinstance(node, list):
            node[_index(node, last, dotted)] = value
        else:
            node[last] = value
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
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _explain(model: type[Config], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location) or "(top)"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
        return f"{where}: unknown key; {hint}"
    got = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
    return f"{where}: {problem['msg']}{got}"


def _fields_at(model: type[Config], path: list[str]) -> list[str]:
    """Names of the keys allowed at a path; all variants' together where a section has several."""
    models: list[type[pydantic.BaseModel]] = [model]
    for key in path:
        inner = [_models_in(m.model_fields[key].annotation) for m in models if key in m.model_fields]
        if inner:  # a list index or a variant's tag does not lead to other models
            models = [m for group in inner for m in group]
    return [name for m in models for name in m.model_fields]


def _models_in(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    if typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        return [m for part in typing.get_args(annotation) for m in _models_in(part)]
    return []


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
