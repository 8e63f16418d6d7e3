"""A data set from its source: every row read, rendered and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.common.errors import ConfigError
from services.coordinator.config import DataConfig, SourceConfig
from services.coordinator.data.building import Builder, Overlong
from services.coordinator.data.columns import pick
from services.coordinator.data.conversations import Problem
from services.coordinator.data.prompts import Dataset, LeftOut, Prompt
from services.coordinator.data.rendering import Renderer
from services.coordinator.data.rows import read_rows
from services.coordinator.text import Text

logger = logging.getLogger(__name__)

PROBLEMS_SHOWN = 20


def load_dataset(source: SourceConfig, config: DataConfig, text: Text, *, weight: float = 1.0) -> Dataset:
    """Every row of the source as `config` wants it. Raises ConfigError that names file, row, column, expected, found.

    What is left out by `overlong` or `bad_rows` is named in the log, and counted in the data set.
    """
    renderer = Renderer(config, text)
    located = source.locate()
    rows = list(read_rows(located, source.subset, source.revision))
    where = ", ".join(source.paths)
    if not rows:
        raise ConfigError(f"{where}: expected at least one row, the data set has none")
    columns = pick(rows, source.columns, where)
    builder = Builder(source, config, columns, renderer)
    prompts: list[Prompt] = []
    bad: list[LeftOut] = []
    overlong: list[LeftOut] = []
    for row in rows:
        try:
            prompts.append(builder.prompt(row))
        except Problem as problem:
            bad.append(LeftOut(row.number, row.place, str(problem)))
        except Overlong as length:
            overlong.append(LeftOut(row.number, row.place, str(length)))
    if config.overlong == "fail":
        bad, overlong = sorted([*bad, *overlong], key=lambda one: one.row), []
    if len(bad) > config.bad_rows * len(rows):
        raise ConfigError(_too_many(where, bad, len(rows), config))
    if not prompts:
        raise ConfigError(
            f"{where}: {len(rows)} rows - {len(bad)} bad - {len(overlong)} longer than max_prompt_tokens "
            f"{config.max_prompt_tokens} = 0 prompts; {(bad or overlong)[0].place}: {(bad or overlong)[0].reason}"
        )
    for one in (*bad, *overlong):
        logger.warning("%s: left out: %s, row %d: %s", source.called, one.place, one.row, one.reason)
    return Dataset(
        source.called,
        tuple(prompts),
        weight=weight,
        picked=f"{where}: {len(rows)} rows of {located.kind}; {columns.describe()}",
        left_out=(*bad, *overlong),
        remarks=tuple([*_remarks_on_files(located.left_out), *builder.remarks(), *renderer.remarks()]),
    )


def _too_many(where: str, bad: Sequence[LeftOut], of: int, config: DataConfig) -> str:
    shown_ones = [f"  {one.place}, row {one.row}, {one.reason}" for one in bad[:PROBLEMS_SHOWN]]
    more = [f"  … and {len(bad) - PROBLEMS_SHOWN} more"] if len(bad) > PROBLEMS_SHOWN else []
    allowed = f"bad_rows {config.bad_rows} allows {int(config.bad_rows * of)}"
    return "\n".join([f"{where}: {len(bad)} bad row(s) of {of}, {allowed}", *shown_ones, *more])


def _remarks_on_files(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"not data, and not read: {', '.join(names[:3])}{more}"]
