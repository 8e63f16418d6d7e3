"""Columns by the names that others use, and what becomes of their values: one row of each convention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.coordinator.config import DataConfig
from services.coordinator.data import Dataset, load_dataset
from services.coordinator.text import Text
from tests.simulated.services import write_model_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(write_model_folder(tmp_path_factory.mktemp("model")))


def load(folder: Path, text: Text, rows: list[dict[str, Any]], **config: Any) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataConfig(path=str(path), **config)
    return load_dataset(settings, settings, text)


USER = [{"role": "user", "content": "2+3?"}]
RENDERED = "<bos><user>2+3?<eos><assistant>"
WITH_SYSTEM = f"<bos><system>be brief<eos>{RENDERED.removeprefix('<bos>')}"

# Name of the convention, a row of it, the prompt as the model sees it, the reference, the columns that scorers get.
CONVENTIONS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "ours": ({"prompt": "2+3?", "reference": "5", "level": 1}, RENDERED, "5", {"level": 1}),
    "trl": ({"prompt": USER, "solution": "5", "topic": "sums"}, RENDERED, "5", {"solution": "5", "topic": "sums"}),
    "trl-label": ({"prompt": "2+3?", "label": True}, RENDERED, "true", {"label": True}),
    "verl": (
        {
            "data_source": "sums",
            "prompt": USER,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 7},
        },
        RENDERED,
        "5",
        {
            "data_source": "sums",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 7},
        },
    ),
    "verl-json-text": (
        {"prompt": USER, "reward_model": '{"style": "rule", "ground_truth": [5, 6]}'},
        RENDERED,
        "[5, 6]",
        {"reward_model": '{"style": "rule", "ground_truth": [5, 6]}'},
    ),
    "skyrl": (
        {"prompt": USER, "env_class": "sums", "reward_spec": {"method": "rule", "ground_truth": "5"}},
        RENDERED,
        "5",
        {"env_class": "sums", "reward_spec": {"method": "rule", "ground_truth": "5"}},
    ),
    "openrlhf": ({"input": "2+3?", "label": "5", "datasource": "s"}, RENDERED, "5", {"label": "5", "datasource": "s"}),
    "verifiers": (
        {"question": "2+3?", "answer": "5", "info": {"n": 1}, "task": "t", "system_prompt": "be brief"},
        WITH_SYSTEM,
        "5",
        {"answer": "5", "info": {"n": 1}, "task": "t"},
    ),
    "alpaca": (
        {"instruction": "2+3?", "input": "", "answer": "5", "output": "Five.", "system": "be brief", "history": []},
        WITH_SYSTEM,
        "5",
        {"answer": "5", "output": "Five."},
    ),
    "alpaca-input": (
        {"instruction": "Add", "input": "2+3", "ground_truth": 5, "history": [["Hi", "Yes?"]]},
        "<bos><user>Hi<eos><assistant>Yes?<eos><user>Add\n2+3<eos><assistant>",
        "5",
        {"ground_truth": 5},
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "human", "value": "2+3?"},
                {"from": "gpt", "value": "5"},
            ]
        },
        WITH_SYSTEM,
        "5",
        {},
    ),
    "openai": (
        {"messages": [*USER, {"role": "assistant", "content": "5"}], "task_name": "sums"},
        RENDERED,
        "5",
        {"task_name": "sums"},
    ),
    "openai-json-text": ({"messages": json.dumps(USER), "ground_truth": "5"}, RENDERED, "5", {"ground_truth": "5"}),
    "openai-parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+3?"}], "name": None}], "answer": "5"},
        RENDERED,
        "5",
        {"answer": "5"},
    ),
    "math": ({"problem": "2+3?", "answer": "5", "level": "1"}, RENDERED, "5", {"answer": "5", "level": "1"}),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_conventions_are_understood(tmp_path: Path, text: Text, convention: str) -> None:
    row, rendered, reference, others = CONVENTIONS[convention]
    (prompt,) = load(tmp_path, text, [row]).prompts
    assert (prompt.text, prompt.reference, json.loads(prompt.columns_json)) == (rendered, reference, others)


def test_what_was_picked_is_told(tmp_path: Path, text: Text) -> None:
    data = load(tmp_path, text, [{"question": "2+3?", "answer": "5", "system": "be brief"}])
    assert data.picked == (
        f"{tmp_path}/rows.jsonl: 1 rows of jsonl; prompt from 'question', reference from 'answer', system from 'system'"
    )
    # Our own names are meant where they are there; what else could have been is told.
    data = load(tmp_path, text, [{"prompt": "2+3?", "question": "x", "reference": "5", "answer": "y"}])
    assert "prompt from 'prompt', reference from 'reference', not used for these: 'question', 'answer'" in data.picked
    assert json.loads(data.prompts[0].columns_json) == {"question": "x", "answer": "y"}
    data = load(tmp_path, text, [{"instruction": "Add", "input": "2+3", "label": 5}])
    assert "prompt from 'instruction' and 'input', reference from 'label'" in data.picked


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "a", "messages": USER, "answer": "b"}, "'question', 'messages' may each hold the prompt"),
        ({"question": "a", "instruction": "b", "answer": "b"}, "choose by columns: {prompt: question}"),
        ({"question": "a", "input": "c", "answer": "b"}, "'question', 'input' may each hold the prompt"),
        ({"problem": "a", "answer": "b", "solution": "c"}, "'answer', 'solution' may each hold the reference"),
        (
            {"prompt": "a", "answer": "b", "reward_model": {"ground_truth": "c"}},
            "'answer', 'reward_model.ground_truth' may each hold the reference; choose by columns: {reference: answer}",
        ),
        ({"prompt": "a", "system": "b", "system_prompt": "c", "answer": "d"}, None),  # our first name is meant
        ({"text": "a", "answer": "b"}, "no column holds a prompt; expected one of prompt, question, problem,"),
        ({"prompt": "a", "gold": "b"}, "no column holds a reference; expected one of reference, answer,"),
        ({"prompt": None, "reference": "b"}, "no column holds a prompt"),
    ],
)
def test_ambiguity_is_refused_with_the_choices(
    tmp_path: Path, text: Text, row: dict[str, Any], complaint: str | None
) -> None:
    if complaint is None:
        load(tmp_path, text, [row])
        return
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(tmp_path, text, [row])


def test_a_map_says_the_rest(tmp_path: Path, text: Text) -> None:
    row = {"task": {"q": "2+3?", "gold": {"value": 5}}, "answer": "x", "solution": "y", "system": "ignored"}
    columns = {"prompt": "task.q", "reference": "task.gold.value", "system": None}
    (prompt,) = load(tmp_path, text, [row], columns=columns).prompts
    assert (prompt.text, prompt.reference) == (RENDERED, "5")
    assert json.loads(prompt.columns_json) == row
    # A column whose name has a dot is that column.
    (prompt,) = load(tmp_path, text, [{"a.b": "2+3?", "reference": "5"}], columns={"prompt": "a.b"}).prompts
    assert prompt.text == RENDERED


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"prompt": "qestion"}, "columns.prompt: no column 'qestion'; did you mean 'question'? there is 'question'"),
        ({"reference": "anwser"}, "columns.reference: no column 'anwser'; did you mean 'answer'?"),
        ({"system": "persona"}, "columns.system: no column 'persona'; there is 'question', 'answer'"),
        ({"tools": "functions"}, "columns.tools: no column 'functions'"),
    ],
)
def test_a_column_that_is_not_there_gets_the_nearest(
    tmp_path: Path, text: Text, columns: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(tmp_path, text, [{"question": "a", "answer": "b"}], columns=columns)


def test_every_row_is_held_against_the_columns(tmp_path: Path, text: Text) -> None:
    """cases.md D08: the row that lacks the field is named, wherever it is, and so are types that differ."""
    rows: list[dict[str, Any]] = [{"question": "a", "label": "true"} for _ in range(60)]
    rows[57] = {"quest": "a", "label": "true"}
    rows[58] = {"question": "a", "label": None}
    rows[59] = {"question": "a"}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, rows)
    message = str(caught.value)
    assert "3 bad row(s) of 60" in message
    assert "rows.jsonl, line 58, row 57, column 'question': expected it, found only 'quest', 'label'" in message
    assert "line 59, row 58, column 'label': expected a reference, found null" in message
    assert "line 60, row 59, column 'label': expected a reference, found no such column" in message

    rows[57:] = [{"question": "a", "label": True}, {"question": "a", "label": 1}]
    data = load(tmp_path, text, rows)
    assert {prompt.reference for prompt in data.prompts} == {"true", "1"}
    (remark,) = data.remarks
    assert f"mixes types: 57 of type str ({tmp_path}/rows.jsonl, line 1), 1 of type bool" in remark


def test_the_answer_is_found_in_a_solution(tmp_path: Path, text: Text) -> None:
    rows = [{"question": "a", "answer": f"First 1.\n#### {n},000\nThen\n#### {n},500"} for n in range(2)]
    asked = load(tmp_path, text, rows, answer_regex="#### (.+)")
    assert [prompt.reference for prompt in asked.prompts] == ["0,500", "1,500"]
    assert asked.remarks == ()
    assert load(tmp_path, text, rows, answer_regex=r"\d,\d+").prompts[1].reference == "1,500"
    unasked = load(tmp_path, text, rows)
    assert unasked.prompts[0].reference == rows[0]["answer"]
    assert "2 reference(s) end as GSM8K's do" in unasked.remarks[0]
    assert "answer_regex: '#### ?(.+)'" in unasked.remarks[0]
    with pytest.raises(ConfigError, match=r"line 2, row 1, column 'answer': expected a match of answer_regex"):
        load(tmp_path, text, [rows[0], {"question": "a", "answer": "42"}], answer_regex="#### (.+)")


def test_an_answer_that_ends_a_conversation_is_no_part_of_the_prompt(tmp_path: Path, text: Text) -> None:
    answered = [*USER, {"role": "assistant", "content": "six"}]
    data = load(tmp_path, text, [{"messages": answered, "ground_truth": "5"}, {"messages": USER, "ground_truth": "5"}])
    assert [(prompt.text, prompt.reference) for prompt in data.prompts] == [(RENDERED, "5")] * 2
    assert "1 conversation(s) end with an answer" in data.remarks[0]
    with pytest.raises(ConfigError, match="line 2, row 1, column 'messages': expected a last answer as reference"):
        load(tmp_path, text, [{"messages": answered}, {"messages": USER}])
    # In a prompt, an answer at the end is a mistake.
    with pytest.raises(ConfigError, match="expected a last message that asks for an answer"):
        load(tmp_path, text, [{"prompt": answered, "reference": "5"}])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"conversations": [{"from": "bot", "value": "a"}]}, "expected from to be one of human, user, gpt"),
        ({"conversations": [{"from": "human", "value": 3}]}, "expected content as a string, found 3"),
        ({"conversations": [{"from": "human", "content": "a"}]}, "expected {role, content}"),
        ({"messages": "[{"}, "column 'messages': expected JSON, found '[{'"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "expected {role, content}"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected content as a string"),
        ({"messages": [{"role": "system", "content": "a"}]}, "found one of the system"),
        ({"messages": [{"role": "user", "content": " "}]}, "expected a prompt, found ' '"),
        ({"messages": [{"role": "system", "content": "s"}, *USER], "system": "t"}, "has a system message, too"),
        ({"messages": USER, "system": 3}, "column 'system': expected a string, found 3"),
        ({"instruction": "a", "input": 3}, "column 'input': expected a string, found 3"),
        ({"instruction": "a", "history": [["q"]]}, "expected pairs of question and answer, found ['q']"),
        ({"prompt": "a", "images": ["x.png"]}, "column 'images': expected text only"),
        ({"prompt": "a", "tools": "{}x"}, "column 'tools': expected JSON"),
        ({"prompt": "a", "tools": {"name": "t"}}, "column 'tools': expected a list of tools"),
    ],
)
def test_values_that_are_not_of_the_convention_are_named(
    tmp_path: Path, text: Text, row: dict[str, Any], complaint: str
) -> None:
    values = {"prompt": "a", "instruction": "a", "messages": USER, "conversations": [{"from": "human", "value": "a"}]}
    good = {name: values[name] for name in row if name in values}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, [good | {"reference": "x"}, row | {"reference": "x"}])
    assert "rows.jsonl, line 2, row 1, column" in str(caught.value)
    assert complaint in str(caught.value)


def test_empty_pictures_are_none(tmp_path: Path, text: Text) -> None:
    assert load(tmp_path, text, [{"prompt": "a", "reference": "b", "images": [], "videos": None}]).prompts
