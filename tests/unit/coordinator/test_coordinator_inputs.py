"""The inputs of a run as a whole: sizes, what is told about the data, prompts that are in training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.config import ModelConfig, parse
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig
from services.coordinator.inputs import Inputs, read_inputs, tell_surprises
from tests.simulated.services import write_model_folder


def write(folder: Path, name: str, prompts: list[str]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "reference": "x"}) + "\n" for prompt in prompts))
    return str(path)


def configuration(data: dict[str, Any], prompts_per_step: int = 2, **changes: Any) -> CoordinatorConfig:
    tree = {
        "steps": 1,
        "data": data,
        "sampling": {"max_tokens": 4},
        "prompts_per_step": prompts_per_step,
        "samples_per_prompt": 2,
        "scorer": "exact",
    }
    return parse(CoordinatorConfig, tree | changes, "recipe")


def read(folder: Path, config: CoordinatorConfig) -> Inputs:
    return read_inputs(config, ModelConfig(path=str(write_model_folder(folder / "model"))))


def told(inputs: Inputs, config: CoordinatorConfig) -> list[tuple[str, str]]:
    notices: list[tuple[str, str]] = []
    tell_surprises(inputs, config, lambda level, text: notices.append((level, text)))
    return notices


def test_a_data_set_smaller_than_its_part_of_a_step_is_refused(tmp_path: Path) -> None:
    """cases.md D05: 2 rows, 4 prompts a Step; and 4 rows of which 2 are too long."""
    small = write(tmp_path, "small", ["a", "b"])
    with pytest.raises(ConfigError, match="'train': 2 rows < prompts_per_step 4; take 1 to 2 prompts per step"):
        read(tmp_path, configuration({"path": small}, 4))
    filtered = write(tmp_path, "filtered", ["a", "b", "c" * 99, "d" * 99])
    with pytest.raises(ConfigError, match=r"'train': 2 rows \(2 more were left out\) < prompts_per_step 4"):
        read(tmp_path, configuration({"path": filtered, "max_prompt_tokens": 50, "overlong": "skip"}, 4))
    large = write(tmp_path, "large", list("abcdefgh"))
    mixed = {"sources": [{"path": large, "weight": 1}, {"path": small, "weight": 3}]}
    with pytest.raises(ConfigError, match=r"'small': 2 rows < prompts_per_step 4 x its share 0\.75; take 1 to 2"):
        read(tmp_path, configuration(mixed, 4))
    assert [dataset.weight for dataset in read(tmp_path, configuration(mixed, 2)).training] == [1.0, 3.0]


def test_the_longest_sequence_is_that_of_all_data_sets(tmp_path: Path) -> None:
    data = {"sources": [{"path": write(tmp_path, "a", ["a", "b"])}, {"path": write(tmp_path, "b", ["abc", "b"])}]}
    assert read(tmp_path, configuration(data)).longest == 4 + 3 + 4  # <bos> <user> … <eos> <assistant>, and the answer
    evaluation = {"sources": [{"path": write(tmp_path, "c", ["abcd"])}, {"path": write(tmp_path, "d", ["a"])}]}
    config = configuration(data, evaluation=evaluation | {"max_tokens": 9})
    assert read(tmp_path, config).longest == 4 + 4 + 9


def test_what_was_found_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "rows", ["a", "b", "", "c" * 99, "[INST] d"])
    config = configuration({"path": path, "max_prompt_tokens": 50, "overlong": "skip", "bad_rows": 0.5})
    assert told(read(tmp_path, config), config) == [
        ("info", f"data set 'train': {path}: 5 rows of jsonl; prompt from 'prompt', reference from 'reference'"),
        (
            "warning",
            f"data set 'train': 1 row(s) look rendered by the template of another model; the first is {path}, line 5",
        ),
        (
            "warning",
            f"data set 'train': 2 of 5 rows left out, all named in the log: {path}, line 3: column 'prompt': expected "
            f"a prompt, found ''; {path}, line 4: column 'prompt': expected at most max_prompt_tokens = 50 tokens, "
            "found 103; raise the limit, or set overlong: skip",
        ),
    ]


def test_prompts_that_are_trained_and_evaluated_on_are_told(tmp_path: Path) -> None:
    data = {"sources": [{"path": write(tmp_path, "a", ["a", "b"])}, {"path": write(tmp_path, "b", ["c", "d"])}]}
    evaluation = {
        "sources": [{"path": write(tmp_path, "new", ["e"])}, {"path": write(tmp_path, "old", ["f", "d", "a"])}],
        "max_tokens": 4,
    }
    config = configuration(data, evaluation=evaluation)
    warnings = [text for level, text in told(read(tmp_path, config), config) if level == "warning"]
    assert warnings == ["data set 'old': 2 of 3 evaluation prompts are trained on too, first row 1, which is b row 1"]
