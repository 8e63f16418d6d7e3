"""Settings of scorers, their names and versions, and files that are refused at the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from services.common.config import parse
from services.common.errors import ConfigError, InvalidRequest, NotFound
from services.reward.config import FunctionScorer as Settings
from services.reward.config import RewardConfig
from services.reward.function_scorer import FunctionScorer
from services.reward.scorer import ScorerSet, full_name

GOOD = "def score(prompt, response, reference): return 1.0\n"


def scorer(folder: Path, source: str = GOOD, **settings: Any) -> FunctionScorer:
    path = folder / "user.py"
    path.write_text(source)
    return FunctionScorer(Settings(**{"name": "exact", "path": path} | settings), folder)


def test_the_version_is_what_determines_the_scores_unless_it_is_given(tmp_path: Path) -> None:
    first = full_name(scorer(tmp_path))
    assert re.fullmatch(r"exact@[0-9a-f]{8}", first)
    assert full_name(scorer(tmp_path, timeout_seconds=99.0, processes=2)) == first
    changed = [
        scorer(tmp_path, GOOD + "# changed\n"),
        scorer(tmp_path, function="other"),
        scorer(tmp_path, arguments={"a": 1}),
        scorer(tmp_path, whole_groups=True),
    ]
    assert len({first, *map(full_name, changed)}) == 5
    assert full_name(scorer(tmp_path, version="2024-01")) == "exact@2024-01"


def test_scorers_are_found_by_name_and_version(tmp_path: Path) -> None:
    one, two, other = (scorer(tmp_path, version=v, name=n) for n, v in [("a", "1"), ("a", "2"), ("b", "1")])
    scorers = ScorerSet([one, two, other])
    assert scorers.find("b") is scorers.find("b@1") is other
    assert scorers.find("a@2") is two
    with pytest.raises(InvalidRequest, match="ask for one of a@1, a@2"):
        scorers.find("a")
    for unknown in ("c", "b@2", "", "@1"):
        with pytest.raises(NotFound, match="a@1, a@2, b@1"):
            scorers.find(unknown)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("import no_such_module\n", {}, "No module named 'no_such_module'"),
        ("def score(:\n", {}, "SyntaxError"),
        ("def other(response): return 1\n", {}, "no function 'score'; it has other"),
        ("import os; os._exit(5)\n", {}, "ended with exit code 5"),
        ("while True: pass\n", {"start_seconds": 1.0}, "no answer within 1 s"),
        ("block = bytearray(500_000_000)\n", {"memory_mib": 200}, r"MemoryError(.|\n)*200 MiB of address space"),
        ("print('words of the user', flush=True)\nimport os; os.abort()\n", {}, r"SIGABRT(.|\n)*words of the user"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, source: str, settings: dict[str, Any], message: str
) -> None:
    refused = scorer(tmp_path, source, **settings)
    with pytest.raises(ConfigError, match=message) as caught:
        await refused.start()
    assert str(tmp_path / "user.py") in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.py cannot be read"):
        FunctionScorer(Settings(name="a", path=tmp_path / "absent.py"), tmp_path)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"scorers": []}, "needs scorers or a reference"),
        ({"scorers": [{"name": "a", "path": "x.py"}, {"name": "a", "path": "y.py"}]}, "'a' is listed twice"),
        ({"scorers": [{"name": "a@1", "path": "x.py"}]}, "scorers.0.name"),
        ({"scorers": [{"name": "a", "path": "x.py", "timeout": 3}]}, "did you mean 'timeout_seconds'"),
        ({"scorers": [{"name": "a", "path": "x.py", "processes": 0}]}, "greater than or equal to 1"),
    ],
)
def test_settings_are_closed_and_checked(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(RewardConfig, tree, "test")
