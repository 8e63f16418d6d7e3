"""The first rows as the model will see them.

As a process, for who may not load tokenizers: `python -m services.coordinator.data.preview --config FILE`, with the
file of a coordinator, prints a JSON object for each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from services.common.config import load_process_config
from services.common.errors import AntiphonError
from services.coordinator.config import CoordinatorConfig, DataConfig, SourceConfig
from services.coordinator.data.building import Builder, Overlong
from services.coordinator.data.columns import pick
from services.coordinator.data.conversations import Problem
from services.coordinator.data.rendering import Renderer
from services.coordinator.data.rows import read_rows
from services.coordinator.text import Text

# Columns are picked by so many rows: a preview takes no longer for a large file.
LOOKED_AT = 100


@dataclass(frozen=True)
class Previewed:
    """One row. Example: "train", "train.jsonl, line 1", text "<|im_start|>user\\nWhat …", 12 tokens, reference "5"."""

    dataset: str
    place: str
    picked: str
    """Which column is what."""
    text: str
    """The prompt, special tokens included."""
    tokens: int
    reference: str
    columns_json: str
    problem: str = ""
    """Why it is no prompt; the fields above are empty then."""


def preview(source: SourceConfig, config: DataConfig, text: Text, count: int = 3) -> list[Previewed]:
    """The first rows of a source. Raises ConfigError where the data set as a whole is wrong."""
    rows = list(islice(read_rows(source.locate(), source.subset, source.revision), max(count, LOOKED_AT)))
    columns = pick(rows, source.columns, ", ".join(source.paths))
    builder = Builder(source, config, columns, Renderer(config, text))
    found = []
    for row in rows[:count]:
        seen = Previewed(source.called, row.place, columns.describe(), "", 0, "", "{}")
        try:
            prompt = builder.prompt(row)
        except (Problem, Overlong) as problem:
            found.append(dataclasses.replace(seen, problem=str(problem)))
            continue
        found.append(
            dataclasses.replace(
                seen,
                text=prompt.text,
                tokens=len(prompt.token_ids),
                reference=prompt.reference,
                columns_json=prompt.columns_json,
            )
        )
    return found


def preview_run(config: CoordinatorConfig, text: Text, count: int = 3) -> list[Previewed]:
    """The first rows of every data set of a run, those of evaluation last."""
    sources: list[SourceConfig] = list(config.data.all_sources)
    if config.evaluation is not None:
        sources += config.evaluation.all_sources(config.data)
    return [row for source in sources for row in preview(source, config.data, text, count)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="services.coordinator.data.preview", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="file of a coordinator process")
    parser.add_argument("--count", type=int, default=3, help="rows of each data set")
    given = parser.parse_args(arguments)
    try:
        process = load_process_config(CoordinatorConfig, given.config)
        for row in preview_run(process.settings, Text(Path(process.model.path)), given.count):
            sys.stdout.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n")
    except AntiphonError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
