"""Whole groups, several functions of a file, composites and built-in scorers, over a real channel and with children."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from antiphon.types.v1 import chat_pb2, trajectory_pb2

from services.common.errors import ConfigError, InvalidRequest
from tests.contract.reward_service import DATA, INFRA, request, serving

USER_FILE = """
import asyncio, os
import numpy

def rank(prompt, responses, reference, **columns):
    assert prompt == "<user>the prompt", prompt
    order = sorted(range(len(responses)), key=lambda i: len(responses[i]))
    return [{"score": float(order.index(i)), "level": columns["level"]} for i in range(len(responses))]

async def rank_async(responses):
    await asyncio.sleep(0.01)
    return numpy.array([float(len(r)) for r in responses])

def by_number(responses, step):  # what it answers is the first response, as Python
    return eval(responses[0], {"numpy": numpy, "step": step, "os": os})

def told(responses, responses_raw, responses_token_ids, finish_reasons, conversation):
    return [
        {"score": 1.0, "raw": len(raw), "ids": sum(ids), "cut": why == "length", "turns": len(conversation)}
        for raw, ids, why in zip(responses_raw, responses_token_ids, finish_reasons)
    ]

def first(response, factor=1.0):
    return {"None": None, "inf": float("inf"), "dead": 0.0}.get(response, factor * len(response))

def second(response):
    if response == "dead": os._exit(1)
    return None if response in ("None", "ab") else 10.0

def plain(response): return 0.5
def with_dict(response): return {"score": 0.5}
def with_parts(response): return {"score": 0.5, "style": 2.0}
"""


def function(folder: Path, name: str, function: str | None = None, **settings: Any) -> dict[str, Any]:
    path = folder / "user.py"
    path.write_text(USER_FILE)
    return {"name": name, "version": "1", "path": str(path), "function": function or name, **settings}


async def test_a_group_is_scored_as_a_whole_in_the_order_of_its_samples(tmp_path: Path) -> None:
    """cases.md R10: a group of 16, its candidates mixed with those of another prompt and sent in any order."""
    texts = {(row, sample): "x" * ((7 * sample + row) % 16) for row in (0, 1) for sample in range(16)}
    requests = [
        request(text, row=row, sample=sample, group_size=16, scorer="rank", columns=f'{{"level": {row}}}')
        for (row, sample), text in texts.items()
    ]
    random.Random(5).shuffle(requests)
    async with serving(tmp_path, [function(tmp_path, "rank", whole_groups=True)]) as reward:
        answers = await reward.score(requests)
        (info,) = (await reward.list()).scorers
    assert info.whole_groups and info.name == "rank"
    found = {(a.prompt_id.row, a.sample_number): a.score for a in answers}
    # All lengths of a group are different: the rank of an answer is its length.
    assert {key: score.value for key, score in found.items()} == {key: len(text) for key, text in texts.items()}
    assert all([(p.name, p.value) for p in score.parts] == [("level", row)] for (row, _), score in found.items())


async def test_what_a_group_function_answers_is_checked(tmp_path: Path) -> None:
    """cases.md R02 and R01: lengths and types, and one bad element fails alone."""
    answers = {
        "[1.0]": "wrong_length",
        "[1.0] * 3": "wrong_length",
        "[1.0] * 5": "wrong_length",
        "1.0": "wrong_type",
        "None": "wrong_type",
        "1 / 0": "exception",
        "os._exit(3)": "killed",
        "[None] * 4": "none",
        "[step, None, float('nan'), 'x']": None,
    }
    scorer = function(tmp_path, "by_number", whole_groups=True, arguments={"step": 0.25})
    async with serving(tmp_path, [scorer]) as reward:
        requests = [
            request(answer, row=row, sample=sample, group_size=4, scorer="by_number")
            for row, answer in enumerate(answers)
            for sample in range(4)
        ]
        found = {(a.prompt_id.row, a.sample_number): a for a in await reward.score(requests)}
    for row, (answer, reason) in enumerate(answers.items()):
        group = [found[row, sample] for sample in range(4)]
        if reason is None:
            assert group[0].score.value == 0.25
            assert [one.failure.reason for one in group[1:]] == ["none", "not_finite", "wrong_type"]
            continue
        assert {one.failure.reason for one in group} == {reason}, answer
        assert {one.failure.kind for one in group} == {INFRA if reason == "killed" else DATA}, answer
        if reason == "wrong_length":
            assert "by_number was given 4 responses" in group[0].failure.message


async def test_async_functions_and_what_is_told_on_request(tmp_path: Path) -> None:
    scorers = [function(tmp_path, name, whole_groups=True) for name in ("rank_async", "told")]
    fields = {
        "response_text_raw": "ab<eos>",
        "response_token_ids": [3, 4],
        "finish_reason": trajectory_pb2.FINISH_REASON_LENGTH,
        "conversation": chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(role="user", content="hi")] * 2),
    }
    async with serving(tmp_path, scorers) as reward:
        (a, b) = await reward.score([request("x" * n, sample=n, group_size=2, scorer="rank_async") for n in (1, 2)])
        (told,) = await reward.score([request("ab", group_size=1, scorer="told", **fields)])
    assert (a.score.value, b.score.value) == (1.0, 2.0)
    assert {p.name: p.value for p in told.score.parts} == {"raw": 7, "ids": 7, "cut": 1, "turns": 2}


async def test_groups_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, [function(tmp_path, "rank_async", whole_groups=True)]) as reward:
        some = [request("x", sample=n, group_size=4, scorer="rank_async") for n in range(3)]
        with pytest.raises(InvalidRequest, match=r"ended with 3 of the 4 candidates of train/0/0"):
            await reward.score(some)
        other = request("x", sample=3, group_size=5, scorer="rank_async")
        with pytest.raises(InvalidRequest, match=r"train/0/0/3: group_size 5"):
            await reward.score([*some, other])
        with pytest.raises(InvalidRequest, match="group_size 0"):
            await reward.score([request("x", group_size=0, scorer="rank_async")])


async def test_a_composite_abstains_fails_and_sums(tmp_path: Path) -> None:
    """cases.md R01: four rows, two functions of one file; None in one, infinity in one, None in both; a dead child."""
    scorers = [
        function(tmp_path, "first", arguments={"factor": 2.0}),
        function(tmp_path, "second"),
        {"name": "total", "version": "7", "type": "composite", "parts": {"first": 1.0, "second": 0.5}},
    ]
    async with serving(tmp_path, scorers) as reward:
        texts = ["abc", "ab", "inf", "None", "dead"]
        answers = {a.sample_number: a for a in await reward.score(
            [request(text, sample=n, scorer="total") for n, text in enumerate(texts)]
        )}  # fmt: skip
    assert {a.scorer for a in answers.values()} == {"total@7"}
    assert answers[0].score.value == 2.0 * 3 + 0.5 * 10.0
    assert {p.name: p.value for p in answers[0].score.parts} == {"first": 6.0, "second": 10.0}
    assert answers[1].score.value == 4.0 and [p.name for p in answers[1].score.parts] == ["first"]
    assert (answers[2].failure.kind, answers[2].failure.reason) == (DATA, "not_finite")
    assert (answers[3].failure.kind, answers[3].failure.reason) == (DATA, "none")
    assert (answers[4].failure.kind, answers[4].failure.reason) == (INFRA, "killed")
    assert "part 'second'" in answers[4].failure.message


async def test_a_number_a_dict_and_a_dict_with_parts_are_all_logged(tmp_path: Path) -> None:
    """cases.md U10."""
    names = ["plain", "with_dict", "with_parts"]
    total = {"name": "total", "type": "composite", "parts": dict.fromkeys(names, 1.0)}
    async with serving(tmp_path, [*(function(tmp_path, name) for name in names), total]) as reward:
        alone = {a.scorer: a.score for n in names for a in await reward.score([request("x", scorer=n)])}
        (whole,) = await reward.score([request("x", scorer="total")])
    assert [s.value for s in alone.values()] == [0.5, 0.5, 0.5]
    assert [(p.name, p.value) for p in alone["with_parts@1"].parts] == [("style", 2.0)]
    parts = {p.name: p.value for p in whole.score.parts}
    assert whole.score.value == 1.5
    assert parts == {"plain": 0.5, "with_dict": 0.5, "with_parts": 0.5, "with_parts/style": 2.0}


async def test_built_in_scorers_score_and_what_hangs_in_them_is_ended(tmp_path: Path) -> None:
    """cases.md R07: the limit is that of a process, whichever thread or loop asked. sympy is in a product without end,
    where no alarm reaches it, and a pattern backtracks without end."""
    scorers = [
        {"name": "math", "type": "math", "timeout_seconds": 50.0},
        {"name": "endless", "type": "math", "timeout_seconds": 1.0},
        {"name": "form", "type": "regex", "pattern": "(a+)+b", "timeout_seconds": 1.0},
        {"name": "long", "type": "length", "shape": "limit", "limit": 2},
        {"name": "total", "type": "composite", "parts": {"math": 1.0, "long": 0.5}},
    ]
    async with serving(tmp_path, scorers) as reward:
        requests = [
            request(r"\boxed{\frac{2}{4}}", row=0, scorer="total", reference="0.5", response_token_ids=[1, 2]),
            request("$(10^{8})!$", row=1, scorer="endless", reference="3"),
            request("a" * 40, row=2, scorer="form"),
            request("2", row=3, scorer="math", reference="$2$"),
        ]
        answers = {a.prompt_id.row: a for a in await reward.score(requests)}
    assert answers[0].score.value == 1.5
    assert {p.name: p.value for p in answers[0].score.parts} == {
        "math": 1.0, "math/parsed": 1.0, "long": 1.0, "long/length": 2.0
    }  # fmt: skip
    for row, words in ((1, "endless (built-in math)"), (2, "form (built-in regex)")):
        assert (answers[row].failure.kind, answers[row].failure.reason) == (DATA, "timeout")
        assert words in answers[row].failure.message
    assert answers[3].score.value == 1.0


async def test_a_built_in_scorer_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    scorer = {"name": "form", "type": "json_schema", "json_schema": {"type": "nothing"}}
    with pytest.raises(ConfigError, match=r"scorer form: built-in json_schema cannot be used: ValueError: not a JSON"):
        async with serving(tmp_path, [scorer]):
            pass
