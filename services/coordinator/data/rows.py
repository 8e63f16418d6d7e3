"""The rows of files as they stand there: column to value. A row that cannot be read says why and keeps its number."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from services.common.errors import ConfigError
from services.coordinator.data.arrow_rows import read_arrow, read_parquet
from services.coordinator.data.hub import read_hub
from services.coordinator.sources import Located


@dataclass(frozen=True)
class Row:
    """One row. Example: number 1, at "train.jsonl, line 3", {"prompt": "What is 2 + 3?", "reference": "5"}."""

    number: int
    """From 0 over all files of the data set, rows that cannot be read included."""
    place: str
    columns: dict[str, Any]
    problem: str = ""
    """Why it could not be read; it has no columns then."""


Read = tuple[str, dict[str, Any] | str]
"""(place within its file, columns, or why there are none)"""


def read_rows(located: Located, subset: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Every row, in order. Raises ConfigError where a file as a whole cannot be read."""
    number = 0
    if located.kind == "hub":
        for columns in read_hub(located.hub_name, located.split, subset, revision):
            yield Row(number, f"{located.hub_name}, row {number}", columns)
            number += 1
        return
    for file in located.files:
        for place, read in _read_file(file, located.kind):
            columns, problem = ({}, read) if isinstance(read, str) else (read, "")
            yield Row(number, f"{file}, {place}", columns, problem)
            number += 1


def _read_file(file: Path, kind: str) -> Iterator[Read]:
    if kind in ("parquet", "arrow"):
        found = read_parquet(file) if kind == "parquet" else read_arrow(file)
        yield from ((f"row {n} of it", columns) for n, columns in enumerate(found))
        return
    reader = {"jsonl": _read_lines, "json": _read_json, "csv": _read_csv}[kind]
    try:
        # A byte-order mark is no part of the first line; csv wants line ends as they are.
        with file.open(encoding="utf-8-sig", newline="" if kind == "csv" else None) as opened:
            yield from reader(file, opened)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from None


def _read_lines(_: Path, lines: TextIO) -> Iterator[Read]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", _object(json.loads(line, parse_constant=_refuse_constant))
        except ValueError as error:
            yield f"line {number}", f"expected a JSON object, found {shown(line.strip())}: {error}"


def _read_json(file: Path, opened: TextIO) -> Iterator[Read]:
    """A list of rows, or an object whose only value is one."""
    try:
        tree = json.load(opened, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    rows = next(iter(tree.values())) if isinstance(tree, dict) and len(tree) == 1 else tree
    if not isinstance(rows, list):
        found = f"an object of {', '.join(map(repr, tree))}" if isinstance(tree, dict) else shown(tree)
        raise ConfigError(f'{file}: expected a list of rows, or {{"data": [rows]}}, found {found}')
    yield from ((f"item {number}", _object(row)) for number, row in enumerate(rows))


def _read_csv(file: Path, opened: TextIO) -> Iterator[Read]:
    """The first line names the columns. Every value is text, and an empty one is none."""
    csv.field_size_limit(2**31 - 1)  # the module's limit, 128 KiB, is shorter than some prompts
    reader = csv.reader(opened, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
    header = next(reader, [])
    twice = sorted({name for name in header if header.count(name) > 1})
    if not header or not all(header) or twice:
        raise ConfigError(f"{file}: expected a first line of distinct column names, found {shown(header)}")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{file}, line {line}: not CSV: {error}") from None
        if cells is None:
            return
        if not cells:
            continue
        if len(cells) != len(header):
            yield f"line {line}", f"expected {len(header)} columns, found {len(cells)}: {shown(cells)}"
        else:
            yield f"line {line}", {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _object(value: Any) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"expected a JSON object, found {shown(value)}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def shown(value: Any) -> str:
    """A value in an error: its beginning."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
