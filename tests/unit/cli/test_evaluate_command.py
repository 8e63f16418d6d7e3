"""`antiphon eval` and `antiphon generate` up to where services would be started, and what is made of their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import errand, evaluate
from services.cli.__main__ import app
from services.cli.recipe import Recipe
from tests.unit.cli.standins.recipe import write_recipe
from tests.unit.cli.standins.run_folder import make_run

HELDOUT = "coordinator.evaluation={path: heldout.jsonl, max_tokens: 8}"
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "a", "reference": "b"}\n')
    return write_recipe(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[Recipe]]:
    """Puts answers in place of the services; the recipes that they would have been started with."""
    recipes: list[Recipe] = []

    def give(answers: Answers) -> list[Recipe]:
        def instead(recipe: Recipe, folder: Path, **how: Any) -> Answers:
            assert folder.is_dir()
            recipes.append(recipe)
            return answers

        monkeypatch.setattr(errand, "answers", instead)
        return recipes

    return give


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def line(row: int, score: float | None, sample: int = 0, **more: Any) -> dict[str, Any]:
    return {"row": row, "sample": sample, "score": score, **more}


def test_the_standard_error_is_that_of_a_mean_over_prompts() -> None:
    # Two answers to each of three prompts: means 1, 0.5, 0; their standard deviation is 0.5.
    lines = [line(0, 1.0), line(0, 1.0, 1), line(1, 1.0), line(1, 0.0, 1), line(2, 0.0), line(2, 0.0, 1)]
    score = evaluate.score_of("held-out", lines)
    assert (score.mean, score.prompts, score.samples, score.failures) == (0.5, 3, 2, 0)
    assert score.standard_error == pytest.approx(0.5 / math.sqrt(3))
    # One that could not be scored is in no mean; one prompt has no spread.
    score = evaluate.score_of("held-out", [line(0, 0.25), line(1, None)])
    assert (score.mean, score.standard_error, score.prompts, score.failures) == (0.25, None, 1, 1)


def test_a_model_by_a_recipe(recipe: Path, asked: Callable[[Answers], list[Recipe]]) -> None:
    recipes = asked({"evaluation": [line(0, 1.0), line(1, 0.0)]})
    done = run("eval", "model", recipe, HELDOUT, "--answers", "kept")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1:] == [
        "evaluation: 0.5000 ± 0.5000 (standard error) over 2 prompts",
        f"answers in {recipe.parent / 'kept'}",
    ]
    assert "policy 0: scorer exact, greedy, at most 8 tokens" in done.stdout
    assert recipes[0].model.path == str(recipe.parent / "model")
    assert len((recipe.parent / "kept" / "evaluation.jsonl").read_text().splitlines()) == 2
    found = json.loads(run("eval", "model", recipe, HELDOUT, "--json").stdout)
    assert found["scores"] == [
        {"dataset": "evaluation", "mean": 0.5, "standard_error": 0.5, "prompts": 2, "samples": 1, "failures": 0}
    ]


def test_a_run_by_its_own_recipe_and_its_newest_policy(recipe: Path, asked: Callable[[Answers], list[Recipe]]) -> None:
    folder = make_run(recipe.parent / "runs" / "first", policies=(9, 10))
    (folder / "recipe.yaml").write_text(recipe.read_text())
    for policy in (9, 10):
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / "export" / f"policy-{policy}" / name).write_bytes((recipe.parent / "model" / name).read_bytes())
    recipes = asked({"evaluation": [line(0, 1.0)]})
    done = run("eval", folder, HELDOUT)
    assert done.exit_code == 0, done.output
    assert recipes[0].model.path == str(folder / "export" / "policy-10")
    assert f"{folder}, policy 10: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["eval", "model", "recipe.yaml"], "ANT-NO-EVALUATION", "coordinator.evaluation: expected held-out prompts"),
        (["eval", "model"], "ANT-CONFIG", "RECIPE: "),
        (["eval", "mdoel", "recipe.yaml"], "ANT-NO-MODEL", "models in"),
        (["eval", "model", "none.yaml"], "ANT-CONFIG", "none.yaml: cannot be read"),
        (["eval", "model", "recipe.yaml", HELDOUT, "run.nam=x"], "ANT-CONFIG", "did you mean 'name'?"),
        (["eval", "model", "recipe.yaml", HELDOUT, "coordinator.scorer=other"], "ANT-CONFIG", "no scorer 'other'"),
        (["eval", "model", "recipe.yaml", HELDOUT, "--answers", "model"], "ANT-CONFIG", "expected a new folder"),
        (["generate", "nowhere", "hello"], "ANT-NO-MODEL", "no such folder"),
        (["generate", "model", " "], "ANT-CONFIG", "PROMPT: expected words"),
        (["generate", "model", "a", "--n", "2"], "ANT-CONFIG", "--n: 2 greedy answers to a prompt are all the same"),
        (["generate", "model", "a", "--max-tokens", "4096"], "ANT-CONFIG", "at most 4095"),
        (["export", "model", "--step", "3", "--to", "x"], "ANT-CONFIG", "--step: it is for a run"),
        (["export", "model", "--to", "recipe.yaml"], "ANT-CONFIG", "nothing is ever replaced"),
        (["export", "model", "--to", "no/where"], "ANT-CONFIG", "there is no folder"),
        (["export", "train.jsonl"], "ANT-NO-MODEL", "no such folder"),
        (["samples", "model"], "ANT-NO-RUN", "no recipe.yaml and manifest.json"),
        (["down", "model"], "ANT-NO-RUN", "no recipe.yaml and manifest.json"),
        (["up", "recipe.yaml", "coordinator.scorer=other"], "ANT-CONFIG", "no scorer 'other'"),
        (["train", "recipe.yaml", "run.nam=x"], "ANT-CONFIG", "did you mean 'name'?"),
        (["resume", "model"], "ANT-NO-RUN", "there is no recipe.yaml"),
    ],
)  # fmt: skip
def test_bad_input_is_told_at_once_as_json(recipe: Path, arguments: list[str], code: str, said: str) -> None:
    before = sorted(recipe.parent.rglob("*"))
    done = run(*arguments, "--json")
    assert done.exit_code == 2 and done.stdout == ""
    (told,) = map(json.loads, done.stderr.splitlines())
    assert (told["code"], told["exit_code"]) == (code, 2) and told["why"] and told["what_to_do"]
    assert said in "\n".join([told["what"], *told["problems"]])
    assert sorted(recipe.parent.rglob("*")) == before


def test_prompts_are_rendered_as_they_were_in_training(recipe: Path, asked: Callable[[Answers], list[Recipe]]) -> None:
    (recipe.parent / "model" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    more = {"response": "r", "tokens": 1, "finish_reason": "FINISH_REASON_STOP", "prompt": "<p>"}
    recipes = asked({"evaluation": [line(0, None, **more), line(0, None, 1, **more), line(1, None, **more)]})
    done = run("generate", "model", "one", "two", "--n", "2", "--temperature", "1", "--seed", "5", "--max-tokens", "9")
    assert done.exit_code == 0, done.output
    assert done.stdout == "> one\n[0] r\n[1] r\n\n> two\n[0] r\n"
    made = recipes[0]
    evaluation = made.coordinator.evaluation
    assert evaluation is not None
    assert (evaluation.samples, evaluation.temperature, evaluation.max_tokens, made.run.seed) == (2, 1.0, 9, 5)
    assert (made.coordinator.data.format, made.model.dtype) == ("chat", "bfloat16")

    folder = make_run(recipe.parent / "runs" / "first", policies=(4,))
    tree = json.loads(recipe.read_text())
    tree["coordinator"]["data"] |= {"system_prompt": "Be brief.", "max_prompt_tokens": 7}
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "export" / "policy-4" / name).write_bytes((recipe.parent / "model" / name).read_bytes())
    lines = [json.loads(one) for one in run("generate", folder, "one", "two", "--json").stdout.splitlines()]
    assert lines[0] == {
        "prompt": "one", "sample": 0, "response": "r", "tokens": 1, "finish_reason": "stop", "rendered": "<p>"
    }  # fmt: skip
    made = recipes[1]
    assert (made.coordinator.data.system_prompt, made.model.dtype) == ("Be brief.", "float32")
    assert made.model.path == str(folder / "export" / "policy-4")
    assert made.coordinator.data.max_prompt_tokens == 2048 - 256  # as long as there is room, not as in training


def test_a_run_without_weights_says_how_to_get_them(recipe: Path) -> None:
    folder = make_run(recipe.parent / "runs" / "first")
    (folder / "recipe.yaml").write_text(recipe.read_text())
    for arguments in (["generate", folder, "a"], ["eval", folder], ["export", folder]):
        done = run(*arguments, HELDOUT) if arguments[0] == "eval" else run(*arguments)
        assert done.exit_code == 2 and "antiphon resume" in done.stderr, done.output
