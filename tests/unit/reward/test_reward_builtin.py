"""Built-in scorers: pure functions against values written out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.config import parse
from services.common.errors import ConfigError
from services.reward.builtin import registry
from services.reward.config import RewardConfig
from services.reward.functions import Caller, understand


def called(
    settings: dict[str, Any], response: str, reference: str = "", **given: Any
) -> tuple[float, dict[str, float]]:
    """Score and parts, as a child would understand them."""
    return understand(answered(settings, response, reference, **given))


def answered(settings: dict[str, Any], response: str, reference: str = "", **given: Any) -> Any:
    (parsed,) = parse(RewardConfig, {"scorers": [{"name": "s", **settings}]}, "test").scorers
    call = Caller(registry.make(parsed.model_dump(mode="json")))
    return call({"prompt": "p", "response": response, "response_raw": response, "reference": reference} | given, {})


def test_every_type_has_an_entry_and_a_file() -> None:
    for kind in registry.MODULES:
        assert "def make(" in registry.source(kind)


@pytest.mark.parametrize(
    ("settings", "response", "reference", "expected"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42.", "42", 0.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({"ignore_punctuation": True}, "«Hello, world!»", "Hello world", 1.0),
        ({"squeeze_whitespace": True}, "a \n b", "a b", 1.0),
        ({"squeeze_whitespace": True, "strip": False}, " a  b", "a b", 0.0),
        ({"unicode_form": "NFC"}, "e\u0301", "é", 1.0),
        ({}, "e\u0301", "é", 0.0),
        ({"unicode_form": "NFKC"}, "①", "1", 1.0),
    ],
)
def test_exact_match(settings: dict[str, Any], response: str, reference: str, expected: float) -> None:
    assert called({"type": "exact_match", **settings}, response, reference) == (expected, {})


@pytest.mark.parametrize(
    ("settings", "response", "reference", "expected"),
    [
        ({}, "12 + 30 = 42.", "42", (1, 1)),
        ({}, "It is 42, not 41", "42", (0, 1)),
        ({}, "about 1,234.50 euros", "1234.5", (1, 1)),
        ({}, "1,234,567", "1234567", (1, 1)),
        ({}, "x = -7", "-7", (1, 1)),
        ({}, "x = −7", "-7", (1, 1)),
        ({}, "10-7", "-7", (0, 1)),
        ({}, "2e-3", "0.002", (1, 1)),
        ({}, "no idea", "3", (0, 0)),
        ({}, "0.1", "0.10", (1, 1)),
        ({}, "0.30000000000000004", "0.3", (0, 1)),
        ({"absolute_tolerance": 0.1}, "0.4", "0.3", (1, 1)),  # 0.1 exactly; in binary floats it is more
        ({"absolute_tolerance": 0.1}, "0.41", "0.3", (0, 1)),
        ({"relative_tolerance": 0.01}, "-101", "-100", (1, 1)),
        ({"relative_tolerance": 0.01}, "102", "100", (0, 1)),
        ({"absolute_tolerance": 1.0}, "1e999999999", "5", (0, 1)),
        ({"absolute_tolerance": 1.0}, "1e999999999", "1e999999999", (1, 1)),
        ({}, "9" * 5000, "9" * 5000, (1, 1)),
        ({}, "72", "Half is 24.\n#### 72", (1, 1)),
        ({"where": "boxed"}, r"\boxed{1} so \boxed{x = \frac{3}{4}5} 9", "5", (1, 1)),
        ({"where": "boxed"}, r"42", "42", (0, 0)),
        ({"where": "boxed"}, r"\boxed{3} and \boxed{4", "3", (1, 1)),
        ({"where": "after_marker", "marker": "####"}, "#### 1 then #### 72 apples, 3 left", "72", (1, 1)),
        ({"where": "after_marker", "marker": "####"}, "72", "72", (0, 0)),
    ],
)
def test_number(settings: dict[str, Any], response: str, reference: str, expected: tuple[float, float]) -> None:
    score, parts = called({"type": "number", **settings}, response, reference)
    assert (score, parts["found"]) == expected


@pytest.mark.parametrize(
    ("settings", "response", "reference", "expected"),
    [
        ({"pattern": r"<a>.*</a>"}, "<a>x</a>", "", 1.0),
        ({"pattern": r"<a>.*</a>"}, "<a>x</a> more", "", 0.0),
        ({"pattern": r"<a>.*</a>", "match": "first"}, "so <a>x</a> more", "", 1.0),
        ({"pattern": r"(?s)<a>.*</a>"}, "<a>x\ny</a>", "", 1.0),
        ({"pattern": r"<a>(.*?)</a>", "match": "first", "group": 1}, "<a>1</a><a> 2 </a>", "1", 1.0),
        ({"pattern": r"<a>(.*?)</a>", "match": "last", "group": 1}, "<a>1</a><a> 2 </a>", "2", 1.0),
        ({"pattern": r"<a>(?P<it>.*?)</a>", "match": "last", "group": "it"}, "<a>1</a>", "2", 0.0),
        ({"pattern": r"a(b)?", "match": "first", "group": 1}, "a", "b", 0.0),
    ],
)
def test_regex(settings: dict[str, Any], response: str, reference: str, expected: float) -> None:
    assert called({"type": "regex", **settings}, response, reference)[0] == expected


def test_regex_reads_the_text_that_it_is_told_to() -> None:
    """cases.md D11: an answer that ends in an end-of-turn token, and a pattern with an anchor."""
    raw = {"response_raw": "<think>x</think>4<eos>"}
    assert called({"type": "regex", "pattern": r"(?s).*\d$", "match": "first"}, "<think>x</think>4", **raw)[0] == 1.0
    assert called({"type": "regex", "pattern": r".*<eos>", "text": "response_raw"}, "4", **raw)[0] == 1.0


OVERLONG = {"shape": "overlong", "limit": 100, "buffer": 20, "factor": 0.5}


@pytest.mark.parametrize(
    ("settings", "length", "expected"),
    [
        (OVERLONG, 80, 0.0),
        (OVERLONG, 81, -0.025),  # e = 1: -(1/20)*0.5
        (OVERLONG, 90, -0.25),
        (OVERLONG, 100, -0.5),
        (OVERLONG, 1000, -0.5),
        (OVERLONG, 0, 0.0),
        ({"shape": "limit", "limit": 10}, 10, 1.0),
        ({"shape": "limit", "limit": 10}, 11, 0.0),
        ({"shape": "target", "target": 50, "width": 20}, 50, 1.0),
        ({"shape": "target", "target": 50, "width": 20}, 55, 0.75),
        ({"shape": "target", "target": 50, "width": 20}, 40, 0.5),
        ({"shape": "target", "target": 50, "width": 20}, 71, 0.0),
    ],
)
def test_length(settings: dict[str, Any], length: int, expected: float) -> None:
    """Tokens are counted as sampled, whatever the text; docs/math.md, "Overlong penalty"."""
    found = called({"type": "length", **settings}, "text", response_token_ids=[7] * length)
    assert found == (pytest.approx(expected, abs=1e-12), {"length": float(length)})


def test_length_in_characters() -> None:
    settings = {"type": "length", "shape": "limit", "limit": 4, "unit": "characters"}
    assert called(settings, "text", response_token_ids=[1] * 99)[0] == 1.0


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("The answer is $0.5$", r"\frac{1}{2}", 1.0),
        (r"so \boxed{\frac{2}{4}}", "1/2", 1.0),
        ("$(x+1)^2$", "x^2+2x+1", 1.0),
        ("$(x-1)^2$", "x^2+2x+1", 0.0),
        ("1.41421356", r"$\sqrt{2}$", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        ("It is 72.", "#### 72", 1.0),
        ("It is 71.", "72", 0.0),
    ],
)
def test_math(response: str, reference: str, expected: float) -> None:
    assert called({"type": "math"}, response, reference) == (expected, {"parsed": 1.0})


def test_math_that_is_none() -> None:
    assert called({"type": "math"}, "I do not know", "72") == (0.0, {"parsed": 0.0})
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        answered({"type": "math"}, "1", "$$")


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}}


@pytest.mark.parametrize(
    ("settings", "response", "expected"),
    [
        ({}, '{"n": 3}', (1, 1)),
        ({}, ' {"n": 0}', (0, 1)),
        ({}, '{"n": "3"}', (0, 1)),
        ({}, 'Here: {"n": 3}', (0, 0)),
        ({}, '{"n": NaN}', (0, 0)),
        ({}, "[" * 100_000, (0, 0)),
        ({"where": "fenced"}, 'First\n```json\n{"n": 0}\n```\nno:\n```json\n{"n": 3}\n```\n', (1, 1)),
        ({"where": "fenced"}, '{"n": 3}', (0, 0)),
    ],
)
def test_json_schema(settings: dict[str, Any], response: str, expected: tuple[float, float]) -> None:
    score, parts = called({"type": "json_schema", "json_schema": SCHEMA, **settings}, response)
    assert (score, parts["parsed"]) == expected


def test_json_schema_of_each_row() -> None:
    assert called({"type": "json_schema"}, '{"n": 3}', json.dumps(SCHEMA))[0] == 1.0
    assert called({"type": "json_schema"}, "{}", json.dumps(SCHEMA))[0] == 0.0
    with pytest.raises(ValueError, match="not a JSON schema"):
        answered({"type": "json_schema"}, "{}", '{"type": "nothing"}')
    with pytest.raises(Exception, match=r"example\.org"):  # what is elsewhere is not fetched
        answered({"type": "json_schema"}, "{}", '{"$ref": "http://example.org/s.json"}')


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "exact_match"},
        {"type": "number"},
        {"type": "math"},
        {"type": "regex", "pattern": "(a)", "group": 1},
        {"type": "json_schema"},
    ],
)
def test_a_row_without_a_reference_is_none_of_their_business(settings: dict[str, Any]) -> None:
    """An abstention, never 0."""
    assert answered(settings, "anything", "") is None


def test_a_reference_that_can_never_be_right_is_an_error() -> None:
    with pytest.raises(ValueError, match="the reference has no number: 'many'"):
        answered({"type": "number"}, "3", "many")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "numbre"}, "numbre.*'exact_match', 'number'"),
        ({"type": "number", "tolerance": 1}, "did you mean 'absolute_tolerance'|did you mean 'relative_tolerance'"),
        ({"type": "number", "where": "after_marker"}, "after_marker needs one"),
        ({"type": "number", "marker": "####"}, "others none"),
        ({"type": "regex", "pattern": "(a"}, "pattern: missing"),
        ({"type": "regex", "pattern": "(?P<x>a)", "group": "y"}, r"no group 'y'; it has \[0, 1, 'x'\]"),
        (
            {"type": "length", "shape": "overlong", "limit": 10},
            r"overlong takes \['buffer', 'limit'\], got \['limit'\]",
        ),
        ({"type": "length", "shape": "overlong", "limit": 10, "buffer": 11}, "at most 10"),
        ({"path": "x.py", "arguments": {"response": 1}}, "response is given by the service"),
        ({"path": "x.py", "arguments": {"finish_reasons": 1}, "whole_groups": True}, "finish_reasons is given"),
        ({"type": "composite", "parts": {}}, "at least 1"),
        ({"type": "composite", "parts": {"other": 1.0}}, "part 'other': there is none; parts can be: none"),
        ({"type": "composite", "parts": {"s": 1.0}}, "part 's': there is none"),  # itself
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(RewardConfig, {"scorers": [{"name": "s", **settings}]}, "test")
