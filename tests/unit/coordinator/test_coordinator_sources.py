"""What a path stands for: kinds told by name and content, folders, patterns, splits, names on the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.coordinator.sources import absolute, locate

PARQUET, ARROW_STREAM, ARROW_FILE = b"PAR1....", b"\xff\xff\xff\xff....", b"ARROW1.."


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"prompt": "a"}\n')


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", b"", "jsonl"),
        ("a.ndjson", b"", "jsonl"),
        ("a.csv", b"", "csv"),
        ("a.tsv", b"", "csv"),
        ("a.parquet", b"", "parquet"),
        ("a.JSONL", b"", "jsonl"),
        ("a.json", b'[{"prompt": "a"}]', "json"),
        ("a.json", b'\xef\xbb\xbf\n[\n  {"prompt": "a"}\n]', "json"),
        ("a.json", b'{\n  "data": [{"prompt": "a"}]\n}', "json"),
        ("a.json", b'{"data": [{"prompt": "a"}]}', "json"),
        ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}\n', "jsonl"),
        ("a.json", b'{"prompt": "a"}\n', "jsonl"),
        ("a.json", b'{"messages": [{"role": "user", "content": "a"}], "answer": 1}', "jsonl"),
        ("rows", b'{"prompt": "a"}\n', "jsonl"),
        ("rows.txt", b"[1]", "json"),
        ("rows", PARQUET, "parquet"),
        ("rows", ARROW_STREAM, "arrow"),
        ("rows", ARROW_FILE, "arrow"),
    ],
)
def test_the_kind_is_told_by_name_and_content(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert locate([str(tmp_path / name)], "auto", None).kind == kind


def test_what_cannot_be_told_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("question,answer\n")
    with pytest.raises(ConfigError, match="cannot tell what it is; say kind: jsonl, json, csv, parquet, arrow"):
        locate([str(path)], "auto", None)
    assert locate([str(path)], "csv", None).kind == "csv"


def test_folders_patterns_and_lists_give_files_in_order(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a.jsonl", "README.md", ".hidden.jsonl", "below/c.jsonl", "below/deep/d.jsonl")

    def names(*paths: str) -> list[str]:
        return [file.name for file in locate([str(tmp_path / path) for path in paths], "auto", None).files]

    assert names("") == ["a.jsonl", "b.jsonl"]
    assert names("b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    assert names("below", "a.jsonl") == ["c.jsonl", "a.jsonl"]
    assert locate([str(tmp_path)], "auto", None).left_out == ("README.md",)
    (tmp_path / "[x].jsonl").write_text("{}")  # a name may look like a pattern
    assert names("[x].jsonl") == ["[x].jsonl"]


def test_files_of_one_data_set_are_of_one_kind(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.csv")
    with pytest.raises(ConfigError, match=r"several kinds: a\.jsonl is jsonl, b\.csv is csv; name one by `kind`"):
        locate([str(tmp_path)], "auto", None)
    assert [file.name for file in locate([str(tmp_path)], "csv", None).files] == ["b.csv"]


def test_splits_of_a_folder_are_never_mixed(tmp_path: Path) -> None:
    touch(tmp_path, "train-00001-of-00002.jsonl", "train-00000-of-00002.jsonl", "test-00000-of-00001.jsonl")
    with pytest.raises(ConfigError, match="expected split to be one of test, train"):
        locate([str(tmp_path)], "auto", None)
    files = locate([str(tmp_path)], "auto", "train").files
    assert [file.name for file in files] == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    with pytest.raises(ConfigError, match=r"no file of split 'dev'; there is test-"):
        locate([str(tmp_path)], "auto", "dev")
    with pytest.raises(ConfigError, match="a file has none"):
        locate([str(tmp_path / "test-00000-of-00001.jsonl")], "auto", "test")


def saved(folder: Path, split: str | None, shards: int = 1) -> None:
    folder.mkdir(parents=True)
    files = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    for name in files:
        (folder / name).write_bytes(ARROW_STREAM)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_split": split, "_data_files": [{"filename": f} for f in files]}))


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    saved(tmp_path / "one", "train", shards=2)
    one = locate([str(tmp_path / "one")], "auto", None)
    assert (one.kind, [file.name for file in one.files]) == (
        "arrow",
        ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"],
    )
    assert locate([str(tmp_path / "one")], "auto", "train").files == one.files
    with pytest.raises(ConfigError, match="holds split 'train' only, `split` says 'test'"):
        locate([str(tmp_path / "one")], "auto", "test")

    saved(tmp_path / "several" / "train", "train")
    (tmp_path / "several" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (file,) = locate([str(tmp_path / "several")], "auto", None).files
    assert file.parent.name == "train"
    saved(tmp_path / "several" / "test", "test")
    (tmp_path / "several" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="expected split to be one of train, test"):
        locate([str(tmp_path / "several")], "auto", None)
    (file,) = locate([str(tmp_path / "several")], "auto", "test").files
    assert file.parent.name == "test"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("trian.jsonl", r"no such file: .*trian\.jsonl; did you mean .*train\.jsonl\?"),
        ("zzz", "no such file: "),
        ("none/train.jsonl", "nor its folder"),
        ("*.parquet", "no file matches"),
        ("empty", "expected data files .* directly in it, found none; for those in folders below"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, path: str, complaint: str) -> None:
    touch(tmp_path, "train.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=complaint):
        locate([str(tmp_path / path)], "auto", None)


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("openai/gsm8k", "auto", "hf://openai/gsm8k"),
        ("openai/gsm8k:train", "auto", "hf://openai/gsm8k:train"),
        ("openai/gsm8k:train[:10%]", "auto", "hf://openai/gsm8k:train[:10%]"),
        ("hf://squad", "auto", "hf://squad"),
        ("squad:train", "hub", "hf://squad:train"),
        # A file that is missing is not looked for on the Hub.
        ("data/gsm8k", "auto", "{here}/data/gsm8k"),
        ("other/rows.jsonl", "auto", "{here}/other/rows.jsonl"),
        ("./openai/gsm8k", "auto", "{here}/openai/gsm8k"),
        ("rows", "auto", "{here}/rows"),
        ("openai/gsm8k", "parquet", "{here}/openai/gsm8k"),
        ("data/*.parquet", "auto", "{here}/data/*.parquet"),
        ("/a/b", "auto", "/a/b"),
    ],
)
def test_paths_and_names_on_the_hub_mean_the_same_from_anywhere(
    tmp_path: Path, path: str, kind: str, expected: str
) -> None:
    (tmp_path / "data").mkdir()
    assert absolute(path, tmp_path, kind) == expected.format(here=tmp_path)
    assert absolute(absolute(path, tmp_path, kind), Path("/"), kind) == expected.format(here=tmp_path)


def test_names_on_the_hub_have_a_split() -> None:
    found = locate(["hf://openai/gsm8k:train"], "auto", None)
    assert (found.kind, found.hub_name, found.split, found.files) == ("hub", "openai/gsm8k", "train", ())
    assert locate(["hf://openai/gsm8k"], "auto", "test").split == "test"
    for paths, split, complaint in [
        (["hf://a/b:train"], "test", "names the split 'train', and `split` says 'test'"),
        (["hf://a/b", "hf://a/c"], None, "list it under `sources`"),
        (["hf://a/b/c"], None, "expected hf://owner/name"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(complaint)):
            locate(paths, "auto", split)
