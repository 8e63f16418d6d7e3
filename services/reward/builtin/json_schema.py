"""Is the answer JSON that fits a schema? By jsonschema; a schema says which draft it is of, else it is the newest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import referencing

from services.reward.config import JsonSchemaScorer

FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def make(settings: JsonSchemaScorer) -> Callable[..., dict[str, float] | None]:
    """The score, and as part `parsed` whether the answer is JSON at all. Raises ValueError for what is no schema."""
    fixed = None if settings.json_schema is None else validator(settings.json_schema)

    def score(response: str, reference: str) -> dict[str, float] | None:
        if fixed is None and not reference:
            return None
        checking = fixed or validator(json.loads(reference))
        try:
            document = read(response, settings.where)
        except (ValueError, RecursionError):
            return {"score": 0.0, "parsed": 0.0}
        return {"score": float(checking.is_valid(document)), "parsed": 1.0}

    return score


def validator(schema: Any) -> Any:
    """What checks documents; a schema elsewhere that this one refers to is not fetched."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}, at {error.json_path}") from None
    return kind(schema, registry=referencing.Registry())


def read(text: str, where: str) -> Any:
    """The document in the answer. Raises ValueError where there is none; NaN and infinities are no JSON."""
    if where == "fenced":
        found = FENCED.findall(text)
        if not found:
            raise ValueError("no fenced block")
        text = found[-1]
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
