"""The same rows out of every kind of file, and the place of each that cannot be read."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from services.common.errors import ConfigError
from services.coordinator.data import hub
from services.coordinator.data.rows import Row, read_rows
from services.coordinator.sources import locate

ROWS = [{"prompt": 'say "a,\nb"', "reference": "1"}, {"prompt": "naïve 日本", "reference": None}]


def read(*paths: Path, kind: str = "auto") -> list[Row]:
    return list(read_rows(locate([str(path) for path in paths], kind, None)))


def stream(path: Path, table: pyarrow.Table) -> Path:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def ipc_file(path: Path, table: pyarrow.Table) -> Path:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def parquet(path: Path, table: pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(table, path, row_group_size=1)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda d: written(d / "a.jsonl", "\n\n".join(json.dumps(row) for row in ROWS)),
    "jsonl-windows": lambda d: written(d / "a.jsonl", "\ufeff" + "\r\n".join(json.dumps(row) for row in ROWS)),
    "json": lambda d: written(d / "a.json", json.dumps(ROWS, indent=1)),
    "json-data": lambda d: written(d / "a.json", json.dumps({"data": ROWS})),
    "csv": lambda d: written(d / "a.csv", 'prompt,reference\n"say ""a,\nb""",1\n\nnaïve 日本,\n'),
    "csv-windows": lambda d: written(d / "a.csv", '\ufeffprompt,reference\r\n"say ""a,\nb""",1\r\nnaïve 日本,\r\n'),
    "tsv": lambda d: written(d / "a.tsv", 'prompt\treference\n"say ""a,\nb"""\t1\nnaïve 日本\t\n'),
    "parquet": lambda d: parquet(d / "a.parquet", pyarrow.Table.from_pylist(ROWS)),
    "arrow-stream": lambda d: stream(d / "a.arrow", pyarrow.Table.from_pylist(ROWS)),
    "arrow-file": lambda d: ipc_file(d / "a.arrow", pyarrow.Table.from_pylist(ROWS)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_kind_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    rows = read(write(tmp_path))
    assert [row.columns for row in rows] == ROWS
    assert [(row.number, row.problem) for row in rows] == [(0, ""), (1, "")]


def test_numbers_run_over_all_files_and_places_are_within_one(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"}\n')
    second = written(tmp_path / "b.jsonl", 'broken\n{"prompt": "c"}\n')
    rows = read(first, second)
    assert [(row.number, row.place) for row in rows] == [
        (0, f"{first}, line 1"),
        (1, f"{first}, line 3"),
        (2, f"{second}, line 1"),
        (3, f"{second}, line 2"),
    ]
    assert "expected a JSON object, found 'broken'" in rows[2].problem


def test_a_csv_row_is_named_by_its_first_line(tmp_path: Path) -> None:
    rows = read(written(tmp_path / "a.csv", 'prompt,reference\n"a\nb",1\nc\nd,2,3\n'))
    assert [row.place.rpartition(", ")[2] for row in rows] == ["line 2", "line 4", "line 5"]
    assert [row.problem for row in rows] == [
        "",
        "expected 2 columns, found 1: ['c']",
        "expected 2 columns, found 3: ['d', '2', '3']",
    ]


def test_a_long_prompt_fits_into_a_csv_cell(tmp_path: Path) -> None:
    (row,) = read(written(tmp_path / "a.csv", f"prompt\n{'x' * 200_000}\n"))
    assert len(row.columns["prompt"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.json", b'[{"a": 1},', "not JSON: .* line 1 column"),
        ("a.json", b'{\n"a": [], "b": []}', r"expected a list of rows, or .* found an object of 'a', 'b'"),
        ("a.csv", b"", "expected a first line of distinct column names"),
        ("a.csv", b"a,b,a\n1,2,3\n", "distinct column names"),
        ("a.csv", b'a,b\n1,2\n"open,3\n', r"a\.csv, line 3: not CSV"),
        ("a.csv", b"a\n\xff\xfe\n", "not UTF-8"),
        ("a.jsonl", b'{"prompt": "\xe9"}\n', "not UTF-8"),
        ("a.parquet", b"PAR1 and no more", "cannot be read as parquet"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00", "cannot be read as arrow"),
        ("a.arrow", b"ARROW1\x00\x00", "cannot be read as arrow"),
        ("a.arrow", b"", "cannot be read as arrow"),
    ],
)
def test_a_file_that_is_broken_as_a_whole_is_refused(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_values_of_parquet_are_pythons(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "a"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "price": Decimal("1.50"),
        "image": b"\x00",
    }
    assert read(parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist([row])))[0].columns == row


def test_json_by_type_is_read_as_json(tmp_path: Path) -> None:
    """As `datasets` stores its Json feature: text of the extension type arrow.json."""
    column = pyarrow.array(['{"a": 1}', None], pyarrow.string()).cast(pyarrow.json_())
    table = pyarrow.table({"info": column, "text": ['{"a": 1}', "b"]})
    rows = read(stream(tmp_path / "a.arrow", table))
    assert [row.columns for row in rows] == [{"info": {"a": 1}, "text": '{"a": 1}'}, {"info": None, "text": "b"}]


DATASETS = '''
"""What datasets_process.py uses of the library: load_dataset, DatasetDict, save_to_disk."""

import json, pathlib, pyarrow

class Dataset:
    def __init__(self, rows): self.rows = rows
    def save_to_disk(self, folder):
        folder = pathlib.Path(folder)
        folder.mkdir()
        table = pyarrow.Table.from_pylist(self.rows)
        with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as file:
            with pyarrow.ipc.new_stream(file, table.schema) as out: out.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_split": None, "_data_files": [{"filename": "data.arrow"}]}))

class DatasetDict(dict): pass

def load_dataset(name, subset, *, split, revision):
    if name == "owner/none": raise ConnectionError("cannot reach it")
    rows = [{"prompt": f"{name} {subset} {split} {revision} {n}"} for n in range(2)]
    return Dataset(rows) if split else DatasetDict(train=Dataset(rows), test=Dataset(rows))
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the library, for this process to find and for the one that fetches to load."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def from_hub(name: str, **more: Any) -> list[Row]:
    return list(read_rows(locate([f"hf://{name}"], "auto", None), **more))


def test_a_split_of_the_hub_is_fetched_by_a_process_of_its_own(library: None) -> None:
    rows = from_hub("owner/name:train", subset="main", revision="abc")
    assert [row.columns["prompt"] for row in rows] == [f"owner/name main train abc {n}" for n in range(2)]
    assert [row.place for row in rows] == ["owner/name, row 0", "owner/name, row 1"]


def test_what_the_library_says_is_said(library: None) -> None:
    with pytest.raises(ConfigError, match="expected split to be one of train, test; write owner/name:train"):
        from_hub("owner/name")
    with pytest.raises(ConfigError, match=r"owner/none: the library datasets cannot fetch it: .*cannot reach it"):
        from_hub("owner/none:train")


def test_a_fetch_has_a_deadline(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FETCH_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="owner/name: was not fetched within"):
        from_hub("owner/name:train")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"owner/name: .* needs the library datasets: .*datasets\.lock"):
        from_hub("owner/name:train")
