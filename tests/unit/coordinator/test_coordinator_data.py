"""Rows are checked one by one and named; the order of visits is a function of position alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.coordinator.config import DataConfig
from services.coordinator.data import Dataset, Order, Prompt, load_dataset
from services.coordinator.identity import PromptKey
from services.coordinator.text import Text
from tests.simulated.services import write_model_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(write_model_folder(tmp_path_factory.mktemp("model")))


def load(folder: Path, text: Text, lines: list[Any], **config: Any) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config_ = DataConfig(path=str(path), **config)
    return load_dataset(config_, config_, text)


def test_a_string_is_one_user_message(tmp_path: Path, text: Text) -> None:
    (prompt,) = load(tmp_path, text, [{"prompt": "hi", "reference": "yes", "level": 3, "tags": ["a"]}]).prompts
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.text == "<bos><user>hi<eos><assistant>"
    # <bos> 1, <user> 4, h 13, i 14, <eos> 2, <assistant> 5
    assert prompt.token_ids == (1, 4, 13, 14, 2, 5)
    assert prompt.reference == "yes"
    assert json.loads(prompt.columns_json) == {"level": 3, "tags": ["a"]}


def test_a_conversation_keeps_its_turns(tmp_path: Path, text: Text) -> None:
    turns = [{"role": r, "content": c} for r, c in [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]]
    (prompt,) = load(
        tmp_path, text, [{"q": turns, "answer": {"n": 1}}], columns={"prompt": "q", "reference": "answer"}
    ).prompts
    assert prompt.text == "<bos><system>s<eos><user>a<eos><assistant>b<eos><user>c<eos><assistant>"
    assert prompt.reference == '{"n": 1}'


def test_plain_text_and_no_reference(tmp_path: Path, text: Text) -> None:
    (prompt,) = load(tmp_path, text, [{"prompt": "ab"}], format="text", columns={"reference": None}).prompts
    assert (prompt.messages, prompt.token_ids, prompt.text, prompt.reference) == ((), (6, 7), "ab", "")


def test_blank_lines_are_no_rows(tmp_path: Path, text: Text) -> None:
    data = load(tmp_path, text, ["", {"prompt": "a", "reference": "b"}, "  ", {"prompt": "c", "reference": "d"}, ""])
    assert [prompt.row for prompt in data.prompts] == [0, 1]
    assert data.longest == 5


@pytest.mark.parametrize(
    ("row", "config", "complaint"),
    [
        ({"reference": "x"}, {}, "row 1, column 'prompt': expected it, found only 'reference'"),
        ({"prompt": "", "reference": "x"}, {}, "row 1, column 'prompt': expected a prompt, found ''"),
        ({"prompt": " \n", "reference": "x"}, {}, "expected a prompt"),
        ({"prompt": [], "reference": "x"}, {}, "expected a string or a list of messages, found []"),
        ({"prompt": 7, "reference": "x"}, {}, "expected a string or a list of messages, found 7"),
        ({"prompt": [{"role": "user"}], "reference": "x"}, {}, "message 0: expected {role, content}"),
        ({"prompt": [{"role": "bot", "content": "a"}], "reference": "x"}, {}, "expected a role of system"),
        ({"prompt": [{"role": "user", "content": None}], "reference": "x"}, {}, "expected content as a string"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "reference": "x"}, {}, "found one of the assistant"),
        ({"prompt": "a"}, {}, "column 'reference': expected a reference, found no such column"),
        ({"prompt": "a", "reference": None}, {}, "expected a reference, found null"),
        (
            {"prompt": "abcdef", "reference": "x"},
            {"max_prompt_tokens": 9},
            "at most max_prompt_tokens = 9 tokens, found 10",
        ),
        ({"prompt": ["a"], "reference": "x"}, {"format": "text"}, "expected a string, found ['a']"),
        ({"prompt": "日本", "reference": "x"}, {"format": "text"}, "the tokenizer makes none"),
        ('["a"]', {}, "expected a JSON object, found ['a']"),
        ('{"prompt": "a", ', {}, "expected a JSON object"),
        ('{"prompt": "a", "reference": NaN}', {}, "NaN is not JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_line_row_and_column(
    tmp_path: Path, text: Text, row: Any, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, [{"prompt": "b", "reference": "x"}, "", row], **config)
    assert f"{tmp_path}/rows.jsonl, line 3, row 1" in str(caught.value)
    assert complaint in str(caught.value)


def test_all_bad_rows_are_counted_and_the_first_are_shown(tmp_path: Path, text: Text) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, [{"prompt": "", "reference": "x"}] * 25)
    assert "25 bad row(s)" in str(caught.value)
    assert "row 19, " in str(caught.value)
    assert "row 20, " not in str(caught.value)
    assert "and 5 more" in str(caught.value)


def test_files_that_are_not_there_or_empty(tmp_path: Path, text: Text) -> None:
    with pytest.raises(ConfigError, match="expected at least one row"):
        load(tmp_path, text, [])
    config = DataConfig(path=str(tmp_path / "row.jsonl"))
    with pytest.raises(ConfigError, match=r"no such file: .*row\.jsonl; did you mean .*rows\.jsonl"):
        load_dataset(config, config, text)


def test_chat_without_a_template_says_the_ways_out(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"chat_template\.jinja there, .* data\.template, or use data\.format=text"):
        load(tmp_path, Text(folder), [{"prompt": "a", "reference": "b"}])


def dataset(rows: int, name: str = "train") -> Dataset:
    prompts = [Prompt(n, (), "", (n,), "", "{}") for n in range(rows)]
    return Dataset(name, tuple(prompts))


def keys(order: Order, count: int) -> list[PromptKey]:
    return [order.at(n)[0] for n in range(count)]


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    order = Order(dataset(10), seed=3, shuffle=True)
    visited = keys(order, 30)
    assert [key.epoch for key in visited] == [0] * 10 + [1] * 10 + [2] * 10
    epochs = [[key.row for key in visited[n : n + 10]] for n in (0, 10, 20)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_a_function_of_seed_and_position() -> None:
    visited = keys(Order(dataset(10), seed=3, shuffle=True), 30)
    assert [Order(dataset(10), seed=3, shuffle=True).at(n)[0] for n in reversed(range(30))] == visited[::-1]
    assert keys(Order(dataset(10), seed=4, shuffle=True), 30) != visited
    key, prompt = Order(dataset(10), seed=3, shuffle=True).at(17)
    assert prompt.row == key.row


def test_without_shuffling_rows_come_as_in_the_file() -> None:
    assert [key.row for key in keys(Order(dataset(4), seed=3, shuffle=False), 6)] == [0, 1, 2, 3, 0, 1]
