"""Codes and exit codes: one table, in the code and in docs/errors.md."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from services.cli import told
from services.common import errors
from services.common.errors import AntiphonError, ConfigError, NotFound

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `(ANT-[A-Z-]+)` \| (\d) \| (.+) \| (.+) \|$", re.MULTILINE)


def all_errors() -> list[type[AntiphonError]]:
    found = [AntiphonError]
    for kind in found:
        found += [one for one in kind.__subclasses__() if one.__module__ in (errors.__name__, told.__name__)]
    return found


def test_every_error_has_a_code_of_its_own_and_a_meaning() -> None:
    codes = [kind.code for kind in all_errors()]
    assert len(codes) == len(set(codes)) >= 15
    assert set(codes) == set(told.MEANINGS)


def test_the_document_is_the_table() -> None:
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text())
    assert {code: (int(number), why, to_do) for code, number, why, to_do in rows} == {
        code: (meaning.exit_code, meaning.why, meaning.what_to_do) for code, meaning in told.MEANINGS.items()
    }


def test_what_why_and_what_to_do() -> None:
    error = ConfigError("recipe.yaml: 1 problem(s)\n  run.nam: unknown key; did you mean 'name'?")
    lines, tree = io.StringIO(), io.StringIO()
    assert told.tell(error, as_json=False, stream=lines) == told.tell(error, as_json=True, stream=tree) == 2
    assert lines.getvalue().splitlines() == [
        *str(error).splitlines(),
        "ANT-CONFIG: what was asked for cannot be done as it stands; nothing was started. "
        "To do: correct what the problems name, each says how",
    ]
    said = json.loads(tree.getvalue())
    assert said.pop("why") and said.pop("what_to_do")
    assert said == {
        "code": "ANT-CONFIG",
        "what": "recipe.yaml: 1 problem(s)",
        "problems": ["run.nam: unknown key; did you mean 'name'?"],
        "exit_code": 2,
    }
    assert told.tell(told.RunFailed("it did"), as_json=True, stream=tree) == 1


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("ANT-CONFIG: no such file", ConfigError, "no such file"),
        ("ANT-NOT-FOUND: no Step 3: there are two\n", NotFound, "no Step 3: there are two"),
        ("Traceback …\nKeyError: 3", errors.Internal, "a process ended with: Traceback …\nKeyError: 3"),
        ("", errors.Internal, "a process ended with: nothing"),
    ],
)
def test_the_last_words_of_a_process(text: str, kind: type[AntiphonError], message: str) -> None:
    error = told.said_by_process(text)
    assert (type(error), str(error)) == (kind, message)
