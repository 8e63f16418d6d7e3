"""Sizes that do not fit are refused with the equation; what is not written has the value of the page."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config import parse
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig


def config(**changes: Any) -> CoordinatorConfig:
    tree = {
        "steps": 5,
        "data": {"path": "rows.jsonl"},
        "sampling": {"max_tokens": 16},
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "scorer": "exact",
    }
    return parse(CoordinatorConfig, tree | changes, "recipe")


def test_defaults() -> None:
    read = config()
    assert (read.algorithm.loss.clip_low, read.algorithm.loss.clip_high) == (0.2, 0.2)
    assert read.algorithm.advantage.norm_by_std
    assert (read.sampling.temperature, read.failure_budget, read.schedule) == (1.0, 0.2, "sync")
    tolerances = read.self_check.logprob_tolerance_float32, read.self_check.logprob_tolerance_bfloat16
    assert (*tolerances, read.self_check.ratio_tolerance) == (1e-4, 0.06, 0.02)


def test_planned_updates() -> None:
    assert config(algorithm={"epochs": 2, "mini_batches": 3}).planned_updates == 5 * 2 * 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples_per_prompt": 1}, "take 2 or more"),
        ({"algorithm": {"mini_batches": 13}}, "3 x samples_per_prompt 4 = 12 trajectories"),
        ({"sampling": {"max_tokens": 16, "temperature": 0.0}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"algorithm": {"loss": {"clip_hi": 0.3}}}, "did you mean 'clip_high'"),
        ({"algorithm": {"control": "shuffled"}}, "algorithm.control"),
        ({"scheduler": "sync"}, "did you mean 'schedule'"),
        ({"steps": 0}, "steps"),
        ({"failure_budget": 1.5}, "failure_budget"),
        (
            {"evaluation": {"path": "e.jsonl", "max_tokens": 1, "samples": 4}},
            "set temperature above 0, or samples to 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert complaint in str(caught.value)


def data(**changes: Any) -> CoordinatorConfig:
    return config(data=changes)


def test_one_data_set_is_a_list_of_one() -> None:
    (source,) = data(path="rows.jsonl", answer_regex="x").data.all_sources
    assert (source.called, source.paths, source.weight, source.answer_regex) == ("train", ("rows.jsonl",), 1.0, "x")


@pytest.mark.parametrize(
    ("path", "called"),
    [
        ("/data/My Sums.jsonl", "my-sums"),
        ("/data/sums", "sums"),
        ("hf://openai/gsm8k:train", "gsm8k"),
        ("/data/*.parquet", "data"),
        ("/data/train-*.parquet", "train"),
        (["/data/b.jsonl", "/data/a.jsonl"], "b"),
    ],
)
def test_a_data_set_of_several_is_called_by_its_path(path: Any, called: str) -> None:
    (source,) = data(sources=[{"path": path}]).data.all_sources
    assert source.called == called


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, "expected path, for one data set, or sources, for several"),
        ({"path": ""}, "expected a path, or a list of paths"),
        ({"path": []}, "expected a path, or a list of paths"),
        ({"path": "a", "sources": [{"path": "b"}]}, "path beside sources: put it into the items of sources"),
        ({"columns": {"prompt": "q"}, "sources": [{"path": "b"}]}, "columns beside sources"),
        ({"sources": [{"name": "b"}]}, "sources.0.path: expected a path"),
        ({"sources": [{"path": "a/x.jsonl"}, {"path": "b/x.csv"}]}, "two data sets are called 'x'"),
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources.0.weight"),
        ({"sources": [{"path": "a", "wieght": 1}]}, "did you mean 'weight'"),
        ({"path": "a", "name": "self-check"}, "a data set of our own"),
        ({"path": "a", "name": "evaluation"}, "two data sets are called 'evaluation'"),
        ({"path": "a", "kind": "xlsx"}, "data.kind"),
        ({"path": "a", "columns": {"promt": "q"}}, "did you mean 'prompt'"),
        ({"path": "a", "answer_regex": "("}, "not a regular expression"),
        ({"path": "a", "subset": "main"}, "subset is for a name on the Hub"),
        ({"path": "a", "input_template": "{}"}, "input_template has no effect with format: chat"),
        ({"path": "a", "add_special_tokens": False}, "add_special_tokens has no effect with format: chat"),
        ({"path": "a", "format": "text", "template": "{{ x }}"}, "template has no effect with format: text"),
        ({"path": "a", "format": "text", "system_prompt": "x"}, "system_prompt has no effect with format: text"),
        ({"path": "a", "format": "text", "input_template": "Q: "}, "expected one {}, where the prompt goes"),
        ({"path": "a", "chat_template_kwargs": {"tools": []}}, "tools is given to every template"),
        ({"path": "a", "bad_rows": 1.0}, "data.bad_rows"),
        ({"path": "a", "overlong": "cut"}, "data.overlong"),
    ],
)
def test_data_that_does_not_fit_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(data=changes, evaluation={"path": "heldout.jsonl", "max_tokens": 4})
    assert complaint in str(caught.value)


def test_evaluation_has_the_columns_of_the_data_unless_it_has_its_own() -> None:
    columns = {"prompt": "q", "reference": "a"}
    own = {"prompt": "question", "reference": "answer"}
    read = config(
        data={"path": "a", "columns": columns, "answer_regex": "x"},
        evaluation={"sources": [{"path": "b"}, {"path": "c", "columns": own}], "max_tokens": 4},
    )
    assert read.evaluation is not None
    first, second = read.evaluation.all_sources(read.data)
    assert (first.columns, first.answer_regex, first.called) == (read.data.columns, "x", "b")
    assert (second.columns.prompt, second.answer_regex) == ("question", None)
    several = config(data={"sources": [{"path": "a", "columns": columns}]}, evaluation={"path": "b", "max_tokens": 4})
    assert several.evaluation is not None
    (only,) = several.evaluation.all_sources(several.data)
    assert (only.columns.prompt, only.called) == ("auto", "evaluation")
