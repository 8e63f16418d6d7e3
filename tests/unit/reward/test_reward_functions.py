"""How a user's answer is understood and the function called, without a child process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.functions import BadValue, Caller, CannotLoad, explain, load, understand, understand_group
from services.reward.signature import GROUP

GIVEN = {"prompt": "p", "response": "r", "reference": "f"}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60) | st.booleans())
def test_finite_numbers_are_scores(value: float) -> None:
    assert understand(value) == (float(value), {})
    assert understand({"score": value, "part": value}) == (float(value), {"part": float(value)})


@given(st.sampled_from([math.nan, math.inf, -math.inf, 10**400, numpy.float32("nan"), numpy.array(numpy.inf)]))
def test_what_is_not_finite_is_no_score(value: Any) -> None:
    for answer in (value, {"score": value}, {"score": 0, "part": value}):
        with pytest.raises(BadValue) as caught:
            understand(answer)
        assert caught.value.reason == "not_finite"


@pytest.mark.parametrize(
    "value", ["1", b"1", [1], (1,), {1}, {}, {"reward": 1}, Decimal(1), object(), 1j, numpy.ones(2)]
)
def test_other_types_are_no_score(value: Any) -> None:
    with pytest.raises(BadValue) as caught:
        understand(value)
    assert caught.value.reason == "wrong_type"


def test_none_abstains_as_the_whole_and_leaves_out_a_part() -> None:
    for answer in (None, {"score": None}):
        with pytest.raises(BadValue) as caught:
            understand(answer)
        assert caught.value.reason == "none"
    assert understand({"score": 2, "a": None, "b": True}) == (2.0, {"b": 1.0})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompt, response, reference: (prompt, response, reference), ("p", "r", "f")),
        (lambda response: response, "r"),
        (lambda response, level: (response, level), ("r", 3)),
        (lambda **everything: sorted(everything), ["level", "prompt", "reference", "response"]),
        (lambda prompt, **rest: rest["level"], 3),
        (lambda response, *, absent=7: absent, 7),
    ],
)
def test_a_function_gets_what_it_names(function: Callable[..., Any], expected: Any) -> None:
    assert Caller(function)(GIVEN, {"level": 3, "response": "of the data set"}) == expected


def test_async_functions_share_one_loop() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def score(response: str) -> str:
        loops.append(asyncio.get_running_loop())
        return response

    call = Caller(score)
    assert (call(GIVEN, {}), call(GIVEN, {})) == ("r", "r")
    assert loops[0] is loops[1]


@pytest.mark.parametrize("function", [lambda response, /: 1, lambda: 1, lambda completions: 1])
def test_signatures_that_can_never_be_called_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CannotLoad):
        Caller(function)


def test_a_function_gets_the_arguments_of_the_recipe_and_they_win_over_columns() -> None:
    def score(response: str, weight: float, level: int = 0) -> tuple[float, int]:
        return weight, level

    call = Caller(score, {"weight": 0.5})
    assert call(GIVEN, {"weight": 9.0, "level": 3}) == (0.5, 3)
    with pytest.raises(CannotLoad, match="it takes no wieght, which the scorer's `arguments` give"):
        Caller(score, {"wieght": 0.5})
    everything: Callable[..., Any] = lambda **words: words["wieght"]  # noqa: E731
    assert Caller(everything, {"wieght": 0.5})(GIVEN, {}) == 0.5


def test_a_function_is_told_more_where_it_names_it() -> None:
    assert Caller(lambda response, finish_reason, response_token_ids: 1).wants == [
        "response_token_ids",
        "finish_reason",
    ]
    assert Caller(lambda responses, finish_reasons: 1, signature=GROUP).wants == ["finish_reasons"]
    assert Caller(lambda **everything: 1).wants == []
    with pytest.raises(CannotLoad, match=r"expected score\(prompt, responses, reference, \*\*columns\)"):
        Caller(lambda response: 1, signature=GROUP)


@pytest.mark.parametrize(
    "answer",
    [[0.5, True, None, {"score": 2, "a": 1}], (0.5, 1, None, {"score": 2.0, "a": 1.0})],
)
def test_a_group_is_understood_element_by_element(answer: Any) -> None:
    found = understand_group(answer, 4, "rank")
    assert found[:2] == [(0.5, {}), (1.0, {})] and found[3] == (2.0, {"a": 1.0})
    assert isinstance(found[2], BadValue) and found[2].reason == "none"


def test_arrays_are_lists_of_a_group() -> None:
    assert understand_group(numpy.array([1.0, 2.0], dtype=numpy.float32), 2, "rank") == [(1.0, {}), (2.0, {})]
    nan = understand_group(numpy.array([1.0, numpy.nan]), 2, "rank")[1]
    assert isinstance(nan, BadValue) and nan.reason == "not_finite"
    (row, _) = understand_group(numpy.ones((2, 3)), 2, "rank")
    assert isinstance(row, BadValue) and row.reason == "wrong_type"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], "wrong_length"),
        ([1.0] * 7, "wrong_length"),
        ([1.0] * 9, "wrong_length"),
        ([], "wrong_length"),
        (numpy.ones(7), "wrong_length"),
        (1.0, "wrong_type"),
        (numpy.float32(1.0), "wrong_type"),
        (numpy.array(1.0), "wrong_type"),
        (True, "wrong_type"),
        (None, "wrong_type"),
        ("12345678", "wrong_type"),
        ({"score": 1.0}, "wrong_type"),
        (iter([1.0] * 8), "wrong_type"),
    ],
)
def test_what_is_not_a_score_for_each_response_is_refused(answer: Any, reason: str) -> None:
    """cases.md R02: one number is not handed to all, a short or long list is not cut or filled."""
    with pytest.raises(BadValue, match=r"rank .*8") as caught:
        understand_group(answer, 8, "rank")
    assert caught.value.reason == reason


def test_a_file_is_loaded_from_its_text(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    source = """
import dataclasses, beside
@dataclasses.dataclass
class A:
    x: int
def f(response): return A(beside.VALUE).x
"""
    assert load(source, str(tmp_path / "file.py"), "f")(response="") == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): pass\nfrom os.path import join\n", "no function 'score'; it has other"),
        ("score = 3", "no function 'score'; it has none"),
        ("def score(:", "SyntaxError"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("1/0", "ZeroDivisionError: division by zero"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_the_reason(source: str, message: str) -> None:
    with pytest.raises(CannotLoad, match=message):
        load(source, "/nowhere/user.py", "score")


def test_a_traceback_ends_with_the_users_frames() -> None:
    source = "def inner():\n    raise KeyError('k')\ndef score(response):\n    inner()\n"
    try:
        Caller(load(source, "/nowhere/trace.py", "score"))(GIVEN, {})
    except KeyError as error:
        text = explain(error)
    assert text.startswith("KeyError: 'k'")
    assert "\"/nowhere/trace.py\", line 2, in inner\n    raise KeyError('k')" in text
    assert "services/reward" not in text
