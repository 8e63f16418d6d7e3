"""Where rows are: a file, several, a folder, a pattern, or a name on the Hugging Face Hub.

Looks at names and at first bytes only, and loads no library, so that a recipe can be checked with it.
"""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common.errors import ConfigError

Kind = Literal["jsonl", "json", "csv", "parquet", "arrow", "hub"]

SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
HUB = "hf://"
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<split>[\w.-]+(?:\[[^\]]*\])?))?")
_MAGIC: dict[bytes, Kind] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
# Files of `datasets` that describe data and are none.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
# Names that files of one folder have when they are its splits.
_SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval")
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True)
class Located:
    """What a path stands for."""

    kind: Kind
    files: tuple[Path, ...]
    """In the order of their rows; empty for the Hub."""
    hub_name: str = ""
    split: str | None = None
    left_out: tuple[str, ...] = ()
    """Names of files in a folder that are not data."""


def absolute(path: str, directory: Path, kind: str) -> str:
    """The path from `directory`; a name on the Hub as hf://name, which means the same from anywhere."""
    if path.startswith(HUB):
        return path
    if kind == "hub" or (kind == "auto" and _is_hub_name(path, directory)):
        return HUB + path
    return str((directory / Path(path).expanduser()).resolve())


def locate(paths: Sequence[str], kind: str, split: str | None) -> Located:
    """What the paths of one data set stand for. Raises ConfigError that says what is there instead."""
    hub = [path for path in paths if kind == "hub" or path.startswith(HUB)]
    if hub:
        return _on_the_hub(hub, len(paths), split)
    found: list[Path] = []
    left_out: list[str] = []
    splits = 0
    for path in paths:
        place = Path(path)
        if place.is_dir():
            files, others = _in_folder(place, kind, split)
            splits += 1
            found += files
            left_out += others
        elif place.is_file():
            found.append(place)
        elif glob.has_magic(path):
            found += _matching(path)
        else:
            raise ConfigError(_missing(place))
    if split is not None and not splits:
        raise ConfigError(f"{paths[0]}: split {split!r} is for a folder or a name on the Hub; a file has none")
    return Located(_one_kind(found, kind), tuple(found), split=split, left_out=tuple(left_out))


def _is_hub_name(path: str, directory: Path) -> bool:
    """owner/name or owner/name:split, unless there is a file or folder of that name or its first part is a folder."""
    match = _HUB_NAME.fullmatch(path)
    if match is None or "/" not in match["name"] or path.startswith(("./", "../")):
        return False
    owner = path.split("/", maxsplit=1)[0]
    return Path(match["name"]).suffix not in SUFFIXES and not (directory / owner).exists()


def _on_the_hub(names: list[str], of: int, split: str | None) -> Located:
    if of != 1:
        raise ConfigError(f"{names[0]}: a name on the Hub is a data set of its own; list it under `sources`")
    match = _HUB_NAME.fullmatch(names[0].removeprefix(HUB))
    if match is None:
        raise ConfigError(f"{names[0]}: expected {HUB}owner/name or {HUB}owner/name:split")
    if split is not None and match["split"] is not None and match["split"] != split:
        raise ConfigError(f"{names[0]}: names the split {match['split']!r}, and `split` says {split!r}")
    return Located("hub", (), hub_name=match["name"], split=match["split"] or split)


def _matching(pattern: str) -> list[Path]:
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
    if not files:
        raise ConfigError(f"{pattern}: no file matches")
    return files


def _in_folder(folder: Path, kind: str, split: str | None) -> tuple[list[Path], list[str]]:
    """Data files of a folder, and the names of others. A folder of `save_to_disk` says itself what it holds."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        splits = _read(saved).get("splits", [])
        if split is None and len(splits) == 1:
            split = splits[0]
        if split is None or split not in splits:
            raise ConfigError(f"{folder}: expected split to be one of {', '.join(splits)}, got {split}")
        return _in_folder(folder / split, kind, None)
    state = folder / "state.json"
    if state.is_file() and kind in ("auto", "arrow"):
        if split is not None and _read(state).get("_split") != split:
            raise ConfigError(f"{folder}: holds split {_read(state).get('_split')!r} only, `split` says {split!r}")
        return [folder / file["filename"] for file in _read(state).get("_data_files", [])], []
    names = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    data = [p for p in names if p.suffix in SUFFIXES and p.name not in _DESCRIPTIONS]
    if kind != "auto":
        same = {kind, "json"} if kind == "jsonl" else {kind}
        data = [p for p in data if SUFFIXES[p.suffix] in same]
    if not data:
        raise ConfigError(
            f"{folder}: expected data files ({', '.join(SUFFIXES)}) directly in it, found none; for those in folders "
            f"below write {folder}/**/*.parquet"
        )
    data = _of_split(folder, data, split)
    return data, [p.name for p in names if p.suffix not in SUFFIXES]


def _of_split(folder: Path, files: list[Path], split: str | None) -> list[Path]:
    """The files of one split, where names like train-00000-of-00002 tell several apart."""
    words = {file: re.split(r"[-_.]", file.stem)[0].lower() for file in files}
    if split is not None:
        chosen = [file for file in files if words[file] == split.lower()]
        if not chosen:
            raise ConfigError(
                f"{folder}: no file of split {split!r}; there is {', '.join(file.name for file in files)}"
            )
        return chosen
    splits = sorted({word for word in words.values() if word in _SPLITS})
    if len(splits) > 1:
        raise ConfigError(f"{folder}: holds several splits; expected split to be one of {', '.join(splits)}")
    return files


def _one_kind(files: Sequence[Path], kind: str) -> Kind:
    if kind in SUFFIXES.values():
        return kind  # type: ignore[return-value]
    kinds = {file: _kind_of(file) for file in files}
    if len(set(kinds.values())) > 1:
        each = ", ".join(f"{file.name} is {found}" for file, found in list(kinds.items())[:4])
        raise ConfigError(f"{files[0].parent}: files of several kinds: {each}; name one by `kind`, or by a pattern")
    return next(iter(kinds.values()))


def _kind_of(file: Path) -> Kind:
    """By name; what a .json holds, and what a file without a known name is, by its first bytes."""
    named = SUFFIXES.get(file.suffix.lower())
    if named is not None and named != "json":
        return named
    try:
        with file.open("rb") as opened:
            head = opened.read(_FIRST_BYTES)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    lines = head.lstrip(b"\xef\xbb\xbf \t\r\n").splitlines()
    first = lines[0].strip() if lines else b""
    if first.startswith(b"["):
        return "json"
    if first.startswith(b"{") and first != b"{":
        return "json" if len(lines) == 1 and _holds_rows(first) else "jsonl"
    if named == "json":
        return "json"
    raise ConfigError(f"{file}: cannot tell what it is; say kind: {', '.join(dict.fromkeys(SUFFIXES.values()))}")


def _holds_rows(line: bytes) -> bool:
    """Whether one object on one line is {"data": [rows]} rather than a row."""
    try:
        tree = json.loads(line)
    except ValueError:
        return False
    values = list(tree.values()) if isinstance(tree, dict) else []
    return len(values) == 1 and isinstance(values[0], list) and all(isinstance(item, dict) for item in values[0])


def _missing(path: Path) -> str:
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1)
    if near:
        return f"no such file: {path}; did you mean {path.parent / near[0]}?"
    return f"no such file: {path}" if path.parent.is_dir() else f"no such file: {path}, nor its folder"


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return tree if isinstance(tree, dict) else {}
