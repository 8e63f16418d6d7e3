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

from services.reward.functions import BadValue, Caller, CannotLoad, explain, load, understand

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
