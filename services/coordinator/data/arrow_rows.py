"""Rows of parquet files, and of the arrow files that `datasets` saves to disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    """Raises ConfigError when it is not parquet."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from _rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as parquet: {error}") from None


def read_arrow(file: Path) -> Iterator[dict[str, Any]]:
    """A stream, as `datasets` writes it, or a file of the IPC format. Raises ConfigError when it is neither."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as opened:
            if opened.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(opened)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                opened.seek(0)
                batches = iter(pyarrow.ipc.open_stream(opened))
            for batch in batches:
                yield from _rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as arrow: {error}") from None


def _rows(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Python values; what is stored as JSON by type (`datasets.Json`) is read as such."""
    encoded = [field.name for field in batch.schema if str(field.type).startswith("extension<arrow.json")]
    for row in batch.to_pylist():
        for name in encoded:
            if row[name] is not None:
                row[name] = json.loads(row[name])
        yield row
