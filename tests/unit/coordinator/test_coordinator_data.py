"""Rows are checked one by one and named; what is left out is counted and named; the first ones can be looked at."""

from __future__ import annotations

import json
import logging
import math
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig, DataConfig
from services.coordinator.data import Dataset, Order, load_dataset
from services.coordinator.data.preview import main as preview_main
from services.coordinator.data.preview import preview
from services.coordinator.text import Text
from tests.simulated import coordinator as simulated
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


LONG = {"prompt": "abcdefghij", "reference": "x"}  # 14 tokens: <bos> <user> ten letters <eos> <assistant>
SHORT = {"prompt": "ab", "reference": "x"}


def test_too_long_prompts_are_left_out_only_when_asked(
    tmp_path: Path, text: Text, caplog: pytest.LogCaptureFixture
) -> None:
    """cases.md D01: never cut. What is kept has the very ids that it has without a limit."""
    with pytest.raises(
        ConfigError, match=r"line 2, row 1, .* max_prompt_tokens = 13 tokens, found 14; raise the limit"
    ):
        load(tmp_path, text, [SHORT, LONG, SHORT], max_prompt_tokens=13)
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, text, [SHORT, LONG, SHORT], max_prompt_tokens=13, overlong="skip")
    assert [(prompt.row, prompt.token_ids) for prompt in data.prompts] == [(n, (1, 4, 6, 7, 2, 5)) for n in (0, 2)]
    (left_out,) = data.left_out
    assert (left_out.row, left_out.place) == (1, f"{tmp_path}/rows.jsonl, line 2")
    assert f"train: left out: {tmp_path}/rows.jsonl, line 2, row 1: column 'prompt'" in caplog.text
    assert load(tmp_path, text, [SHORT, LONG], max_prompt_tokens=14).longest == 14


def test_a_share_of_bad_rows_may_be_left_out(tmp_path: Path, text: Text, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = [SHORT] * 8 + ["broken", {"prompt": "", "reference": "x"}]
    with pytest.raises(ConfigError, match=r"2 bad row\(s\) of 10, bad_rows 0\.1 allows 1"):
        load(tmp_path, text, rows, bad_rows=0.1)
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, text, rows, bad_rows=0.2)
    assert [prompt.row for prompt in data.prompts] == list(range(8))
    assert [one.row for one in data.left_out] == [8, 9]
    assert "line 9, row 8: expected a JSON object, found 'broken'" in caplog.text
    assert "line 10, row 9: column 'prompt': expected a prompt, found ''" in caplog.text
    # A prompt that is skipped for its length is no bad row; one that fails for it is.
    assert len(load(tmp_path, text, [SHORT, LONG], max_prompt_tokens=13, overlong="skip").left_out) == 1
    assert len(load(tmp_path, text, [SHORT, LONG], max_prompt_tokens=13, bad_rows=0.5).left_out) == 1


def test_a_data_set_emptied_by_its_filters_says_the_numbers(tmp_path: Path, text: Text) -> None:
    """cases.md D05."""
    rows = [LONG] * 10 + [{"prompt": "", "reference": "x"}]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, rows, max_prompt_tokens=13, overlong="skip", bad_rows=0.1)
    assert "11 rows - 1 bad - 10 longer than max_prompt_tokens 13 = 0 prompts" in str(caught.value)
    assert "line 11: column 'prompt': expected a prompt" in str(caught.value)


def test_ids_of_rows_do_not_move_when_others_are_left_out(tmp_path: Path, text: Text) -> None:
    data = load(tmp_path, text, [SHORT, "broken", SHORT, SHORT], bad_rows=0.5)
    visited = [Order(data, seed=3, shuffle=True).at(n) for n in range(6)]
    assert {key.row for key, _ in visited} == {0, 2, 3}
    assert all(key.row == prompt.row for key, prompt in visited)


def test_files_beside_the_data_are_told(tmp_path: Path, text: Text) -> None:
    load(tmp_path, text, [SHORT])
    (tmp_path / "README.md").write_text("words")
    config = DataConfig(path=str(tmp_path))
    assert load_dataset(config, config, text).remarks == ("not data, and not read: README.md",)


def test_what_json_lacks_is_kept_from_scorers_and_told(tmp_path: Path, text: Text) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": ["ab", "ab"],
        "reference": [1.5, 2.5],
        "when": [date(2026, 1, 2), date(2026, 1, 3)],
        "cost": [Decimal("0.10"), None],
        "blob": [b"x", None],
        "n": [math.nan, 1.0],
    }
    config = DataConfig(path=str(tmp_path / "rows.parquet"))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    data = load_dataset(config, config, text)
    assert [json.loads(prompt.columns_json) for prompt in data.prompts] == [
        {"when": "2026-01-02", "cost": "0.10"},
        {"when": "2026-01-03", "cost": None, "blob": None, "n": 1.0},
    ]
    assert [prompt.reference for prompt in data.prompts] == ["1.5", "2.5"]
    told = [remark.partition(" is kept from scorers")[0] for remark in data.remarks]
    assert told == ["column 'blob' of 1 row(s)", "column 'n' of 1 row(s)"]
    columns["reference"][0] = math.nan
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="row 0 of it, row 0, column 'reference': expected a reference"):
        load_dataset(config, config, text)


def test_the_first_rows_are_shown_as_the_model_sees_them(tmp_path: Path, text: Text) -> None:
    (tmp_path / "rows.csv").write_text("question,answer,level\nab,1,x\n,2,y\nba,3,z\nabc,4,z\n")
    config = DataConfig(path=str(tmp_path / "rows.csv"), name="sums")
    first, second, third = preview(config, config, text)
    assert (first.dataset, first.place) == ("sums", f"{tmp_path}/rows.csv, line 2")
    assert (first.text, first.tokens, first.reference) == ("<bos><user>ab<eos><assistant>", 6, "1")
    assert (first.picked, json.loads(first.columns_json)) == (
        "prompt from 'question', reference from 'answer'",
        {"answer": "1", "level": "x"},
    )
    assert second.problem == "column 'question': expected it, found null"
    assert third.text == "<bos><user>ba<eos><assistant>"


def test_the_preview_is_a_process_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model_folder(tmp_path / "model")
    settings = simulated.settings(tmp_path)
    service = ServiceConfig(run_id="r", worker_id="coordinator-0", run_dir=tmp_path, nats_url="nats://127.0.0.1:1")
    process = ProcessConfig[CoordinatorConfig](service=service, model=ModelConfig(path=str(model)), settings=settings)
    (tmp_path / "process.yaml").write_text(dump(process))
    assert preview_main(["--config", str(tmp_path / "process.yaml"), "--count", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["dataset"] for row in rows] == ["train", "train", "evaluation", "evaluation"]
    assert rows[0]["text"] == "<bos><user>what is 0?<eos><assistant>"
    (tmp_path / "heldout.jsonl").unlink()
    assert preview_main(["--config", str(tmp_path / "process.yaml")]) == 2
    assert "ANT-CONFIG: no such file" in capsys.readouterr().err
