"""Prompts from a JSON Lines file, every row checked before anything starts, and the order of their visits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, InvalidRequest
from services.coordinator.config import DataConfig
from services.coordinator.identity import PromptKey
from services.coordinator.text import Message, Text

ROLES = ("system", "user", "assistant", "tool")
PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """One row, ready to be sampled from. Example: row 0 of line 1, "What is 2 + 3?", 12 token ids, reference "5"."""

    row: int
    messages: tuple[Message, ...]
    """The conversation; empty when the prompt is plain text."""
    text: str
    """The rendered prompt, special tokens included."""
    token_ids: tuple[int, ...]
    reference: str
    columns_json: str
    """Every other column, as one JSON object."""


@dataclass(frozen=True)
class Dataset:
    """The prompts of one file, in its order."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)


def load_dataset(name: str, path: Path, config: DataConfig, text: Text) -> Dataset:
    """Reads and renders every row. Raises ConfigError that lists file, line, column, expected, found."""
    if config.format == "chat" and not text.has_template:
        text.render([])  # raises with the two ways out
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            prompts.append(_prompt(len(prompts) + len(problems), line, config, text))
        except _Problem as problem:
            problems.append(f"  {path}, line {number}, {problem}")
    if problems:
        more = [f"  … and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        raise ConfigError("\n".join([f"{path}: {len(problems)} bad row(s)", *problems[:PROBLEMS_SHOWN], *more]))
    if not prompts:
        raise ConfigError(f"{path}: expected at least one row, the file has none")
    return Dataset(name, tuple(prompts))


class Order:
    """Which prompt is the n-th that the run visits: a pure function of n, so any position can be found again."""

    def __init__(self, dataset: Dataset, *, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._rows: list[int] = []

    def at(self, position: int) -> tuple[PromptKey, Prompt]:
        """The prompt at a position counted from 0 over all epochs."""
        epoch, place = divmod(position, len(self._dataset.prompts))
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._order_of(epoch)
        row = self._rows[place]
        return PromptKey(self._dataset.name, epoch, row), self._dataset.prompts[row]

    def _order_of(self, epoch: int) -> list[int]:
        """Rows sorted by a hash: the same on every machine and version of Python."""
        rows = range(len(self._dataset.prompts))
        if not self._shuffle:
            return list(rows)
        prefix = f"{self._seed}/{self._dataset.name}/{epoch}/"
        return sorted(rows, key=lambda row: hashlib.sha256(f"{prefix}{row}".encode()).digest())


class _Problem(Exception):
    """What is wrong with one row: column, expected, found."""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of each line that is not blank."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


def _prompt(row: int, line: str, config: DataConfig, text: Text) -> Prompt:
    try:
        columns = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _Problem(f"row {row}: expected a JSON object, found {_shown(line.strip())}: {error}") from None
    if not isinstance(columns, dict):
        raise _Problem(f"row {row}: expected a JSON object, found {_shown(columns)}")
    messages, rendered, ids = _rendered(row, columns, config, text)
    if len(ids) > config.max_prompt_tokens:
        raise _Problem(
            f"row {row}, column {config.prompt_column!r}: expected at most max_prompt_tokens = "
            f"{config.max_prompt_tokens} tokens, found {len(ids)}; raise the limit or take the row out"
        )
    others = {k: v for k, v in columns.items() if k not in (config.prompt_column, config.reference_column)}
    return Prompt(
        row=row,
        messages=messages,
        text=rendered,
        token_ids=tuple(ids),
        reference=_reference(row, columns, config),
        columns_json=json.dumps(others, ensure_ascii=False),
    )


def _rendered(
    row: int, columns: dict[str, Any], config: DataConfig, text: Text
) -> tuple[tuple[Message, ...], str, list[int]]:
    where = f"row {row}, column {config.prompt_column!r}"
    if config.prompt_column not in columns:
        raise _Problem(f"{where}: expected it, found only {', '.join(map(repr, columns)) or 'no column'}")
    value = columns[config.prompt_column]
    if config.format == "text":
        if not isinstance(value, str):
            raise _Problem(f"{where}: expected a string, found {_shown(value)}")
        if not value.strip():
            raise _Problem(f"{where}: expected a prompt, found {_shown(value)}")
        ids = text.encode_plain(value)
        if not ids:
            raise _Problem(f"{where}: expected at least one token, the tokenizer makes none of {_shown(value)}")
        return (), text.decode(ids, special_tokens=True), ids
    messages = _conversation(where, value)
    try:
        rendered = text.render(messages)
    except InvalidRequest as error:
        raise _Problem(f"{where}: {error}") from None
    ids = text.encode_rendered(rendered)
    if not ids:
        raise _Problem(f"{where}: expected at least one token, the chat template makes none of {_shown(value)}")
    return messages, rendered, ids


def _conversation(where: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _Problem(f"{where}: expected a string or a list of messages, found {_shown(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise _Problem(f"{where}, message {number}: expected {{role, content}}, found {_shown(message)}")
        if message["role"] not in ROLES:
            raise _Problem(
                f"{where}, message {number}: expected a role of {', '.join(ROLES)}, found {_shown(message['role'])}"
            )
        if not isinstance(message["content"], str):
            raise _Problem(
                f"{where}, message {number}: expected content as a string, found {_shown(message['content'])}"
            )
    if value[-1]["role"] == "assistant":
        raise _Problem(f"{where}: expected a last message that asks for an answer, found one of the assistant")
    if not value[-1]["content"].strip():
        raise _Problem(f"{where}: expected a prompt, found {_shown(value[-1]['content'])}")
    return tuple(value)


def _reference(row: int, columns: dict[str, Any], config: DataConfig) -> str:
    """Text as it is; JSON of anything else."""
    if config.reference_column is None:
        return ""
    value = columns.get(config.reference_column)
    if value is None:
        raise _Problem(
            f"row {row}, column {config.reference_column!r}: expected a reference, found "
            f"{'null' if config.reference_column in columns else 'no such column'}; without any, set reference_column "
            "to null"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
