"""Every kept result has the one schema, and the demo's claims are judged as the README states them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from benchmarks import demo_control, results


def test_kept_results_have_the_schema() -> None:
    for path in results.FOLDER.glob("*.json"):
        result = results.read(path)
        assert result.name == path.stem
        assert result.samples
        assert result.summary


def test_a_result_reads_back(tmp_path: Path) -> None:
    result = results.begin("example", {"seed": 1})
    result.samples["step_seconds"] = [0.5, 0.25]
    result.summary["median_step_seconds"] = 0.375
    path = results.write(result, tmp_path / "deep" / "example.json")
    assert results.read(path) == result
    assert [entry.name for entry in path.parent.iterdir()] == ["example.json"]
    assert result.hardware.cores >= 1
    assert result.versions["torch"]


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    tree = json.loads(results.write(results.begin("x", {}), tmp_path / "x.json").read_text())
    with pytest.raises(pydantic.ValidationError, match="extra"):
        results.Result.model_validate({**tree, "note": "?"})


def summary(*, gain: float, p: float, control_high: float, exported: float) -> dict[str, Any]:
    return {
        "none": {"gain": gain, "p": p},
        "shuffled_rewards": {"gain_high_95": control_high},
        "exported": {"score_by_transformers": exported, "score_by_the_run": 0.7},
    }


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, [True, True, True]),
        ({"gain": 0.14, "control_high": 0.0}, [False, True, True]),
        ({"p": 0.01}, [False, True, True]),
        ({"control_high": 0.1}, [True, False, True]),
        ({"exported": 0.675}, [True, True, False]),
    ],
)
def test_claims_are_judged(changed: dict[str, float], holds: list[bool]) -> None:
    good = {"gain": 0.4, "p": 0.0001, "control_high": 0.09, "exported": 0.71}
    assert list(demo_control.judge(summary(**{**good, **changed})).values()) == holds
