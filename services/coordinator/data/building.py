"""From one row to one prompt."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from services.coordinator.chat_template import Message
from services.coordinator.config import DataConfig, SourceConfig
from services.coordinator.data.columns import Columns, value_of
from services.coordinator.data.conversations import Problem, conversation, plain_prompt, refuse_media, tools_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.rendering import Renderer
from services.coordinator.data.rows import Row, shown

GSM8K = re.compile(r"(?m)^#### ?\S")
GSM8K_REGEX = "#### ?(.+)"


class Overlong(Exception):
    """How long a prompt is."""


class Builder:
    """From rows to prompts; keeps count of what may not be meant."""

    def __init__(self, source: SourceConfig, config: DataConfig, columns: Columns, renderer: Renderer) -> None:
        self._config = config
        self._columns = columns
        self._renderer = renderer
        self._answer = None if source.answer_regex is None else re.compile(source.answer_regex)
        self._types: dict[str, tuple[int, str]] = {}
        self._unsaid: Counter[str] = Counter()
        self._own_system = self._dropped_answers = self._gsm8k = 0

    def prompt(self, row: Row) -> Prompt:
        """Raises Problem, and Overlong."""
        if row.problem:
            raise Problem(row.problem)
        refuse_media(row.columns)
        answer = None
        if self._config.format == "text":
            messages: list[Message] = []
            rendered, ids = self._renderer.plain(plain_prompt(row.columns, self._columns), row.place)
        else:
            messages, answer = conversation(row.columns, self._columns)
            messages = self._with_system(messages)
            rendered, ids = self._renderer.chat(messages, tools_of(row.columns, self._columns), row.place)
        if len(ids) > self._config.max_prompt_tokens:
            raise Overlong(
                f"column {self._columns.prompt!r}: expected at most max_prompt_tokens = "
                f"{self._config.max_prompt_tokens} tokens, found {len(ids)}; raise the limit, or set overlong: skip"
            )
        return Prompt(
            row=row.number,
            messages=tuple(messages),
            text=rendered,
            token_ids=tuple(ids),
            reference=self._reference(row, answer),
            columns_json=self._others(row.columns),
        )

    def remarks(self) -> list[str]:
        """What may not be meant, of all rows so far."""
        found = []
        if self._own_system:
            found.append(f"{self._own_system} row(s) keep a system message of their own, not system_prompt")
        if self._dropped_answers:
            found.append(f"{self._dropped_answers} conversation(s) end with an answer, which is no part of the prompt")
        if len(self._types) > 1:
            kinds = ", ".join(f"{count} of type {name} ({where})" for name, (count, where) in self._types.items())
            found.append(f"column {self._columns.reference!r} mixes types: {kinds}")
        if self._gsm8k and self._answer is None:
            found.append(
                f"{self._gsm8k} reference(s) end as GSM8K's do, in '#### answer': the grader gets all of it; for the "
                f"answer alone set answer_regex: '{GSM8K_REGEX}'"
            )
        found += [
            f"column {name!r} of {count} row(s) is kept from scorers: it holds what JSON cannot"
            for name, count in self._unsaid.items()
        ]
        return found

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self._config.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            self._own_system += 1
            return messages
        return [{"role": "system", "content": self._config.system_prompt}, *messages]

    def _reference(self, row: Row, answer: str | None) -> str:
        """Text as it is, JSON of anything else; of that what answer_regex finds last."""
        column = self._columns.reference
        if answer is not None and not self._columns.last_answer:
            self._dropped_answers += 1
        if column is None and not self._columns.last_answer:
            return ""
        value = answer if column is None else value_of(row.columns, column)
        if value is None or (isinstance(value, float) and math.isnan(value)):  # parquet has NaN
            raise Problem(self._no_reference(row.columns, column))
        count, first = self._types.get(type(value).__name__, (0, row.place))
        self._types[type(value).__name__] = (count + 1, first)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
        self._gsm8k += bool(GSM8K.search(text))
        if self._answer is None:
            return text
        matches = list(self._answer.finditer(text))
        if not matches:
            raise Problem(
                f"column {column!r}: expected a match of answer_regex {self._answer.pattern!r}, found {shown(text)}"
            )
        return str(matches[-1].group(1 if self._answer.groups else 0)).strip()

    def _no_reference(self, columns: Mapping[str, Any], column: str | None) -> str:
        if column is None:
            return f"column {self._columns.prompt!r}: expected a last answer as reference, found none; name a column"
        found = "null" if column in columns else "no such column"
        return f"column {column!r}: expected a reference, found {found}; without any, set columns: {{reference: null}}"

    def _others(self, columns: Mapping[str, Any]) -> str:
        """Every column that is nothing else, as a JSON object."""
        others = {name: value for name, value in columns.items() if name not in self._columns.taken}
        try:
            return json.dumps(others, ensure_ascii=False, allow_nan=False, default=_plain)
        except (TypeError, ValueError):
            unsaid = [name for name, value in others.items() if not _has_json(value)]
            self._unsaid.update(unsaid)
            kept = {name: value for name, value in others.items() if name not in unsaid}
            return json.dumps(kept, ensure_ascii=False, default=_plain)


def _has_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> str:
    """Values of parquet that JSON lacks and that have one obvious text."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
