"""The built-in scorers by type. The file of one is imported where it is needed, since some bring a library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

from services.reward.config import BuiltinScorer

MODULES = {
    "exact_match": "exact_match",
    "number": "number",
    "regex": "regex",
    "length": "length",
    "math": "math_equivalence",
    "json_schema": "json_schema",
}
"""Type of the settings → module beside this one, whose `make(settings)` gives the function."""

LIMITS = ("name", "version", "timeout_seconds", "memory_mib", "processes", "start_seconds")
"""Settings that do not change a score."""


def make(settings: dict[str, Any]) -> Callable[..., Any]:
    """The function of a scorer, from its settings as JSON. Raises ImportError where its library is not installed."""
    parsed: BuiltinScorer = pydantic.TypeAdapter(BuiltinScorer).validate_python(settings)
    module = importlib.import_module(f"{__package__}.{MODULES[parsed.type]}")
    function: Callable[..., Any] = module.make(parsed)
    return function


def source(kind: str) -> str:
    """The text of the file that makes scorers of this type: a part of their version."""
    return (Path(__file__).parent / f"{MODULES[kind]}.py").read_text(encoding="utf-8")
