"""`antiphon eval`: the held-out score of a model, a checkpoint or a run, by a recipe's prompts, scorer and settings."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.cli import errand, export
from services.cli.preflight import lacks
from services.cli.recipe import Recipe, problems, read_recipe
from services.cli.subject import Subject, find_subject, weights_of_run
from services.cli.told import NoEvaluation
from services.common.errors import ConfigError


@dataclass(frozen=True)
class Score:
    """Of one data set. Example: "evaluation", 0.75 ± 0.027 over 256 prompts, one greedy answer each."""

    dataset: str
    mean: float
    standard_error: float | None
    """Of the mean over prompts drawn like these, one number per prompt; None for a single prompt."""
    prompts: int
    """That have a score."""
    samples: int
    """Answers to each prompt."""
    failures: int
    """Answers that could not be scored; they are in no mean."""


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated, how, and what came of it."""

    model: str
    version: int
    scorer: str
    temperature: float
    max_tokens: int
    scores: list[Score]
    answers: str | None
    """Folder with every answer, where one was asked for."""


def evaluate(
    named: Path, words: list[str], *, answers_to: Path | None, quiet: bool, modules: Mapping[str, str] | None = None
) -> Evaluated:
    """`words`: a recipe, or none for a run's own, then key.path=value. Raises ConfigError, RunFailed, Interrupted."""
    subject = find_subject(named)
    path, assignments = _recipe_of(subject, words)
    keep = None if answers_to is None else _new_folder(answers_to)
    _ = checked(path, [*assignments, *_model_path(subject)])
    with errand.scratch("eval") as folder:
        model, version = weights(subject, folder / "model")
        recipe = checked(path, [*assignments, f"model.path={json.dumps(str(model))}"])
        evaluation = recipe.coordinator.evaluation
        assert evaluation is not None
        (folder / "services").mkdir()
        answers = errand.answers(recipe, folder / "services", score=True, quiet=quiet, modules=modules)
        if keep is not None:
            _keep(answers, keep)
    return Evaluated(
        model=str(subject.path),
        version=version,
        scorer=recipe.coordinator.scorer,
        temperature=evaluation.temperature,
        max_tokens=evaluation.max_tokens,
        scores=[score_of(dataset, lines) for dataset, lines in answers.items()],
        answers=None if keep is None else str(keep),
    )


def weights(subject: Subject, scratch: Path) -> tuple[Path, int]:
    """A Hugging Face folder of what was named, made in `scratch` where it is a checkpoint; and its version."""
    if subject.kind == "model":
        return subject.path, export.version_of(subject)
    if subject.kind == "run":
        newest = weights_of_run(subject.path)
        if newest.exported:
            return newest.path, newest.version
        path, version = newest.path, newest.version
    else:
        path, version = subject.path, export.version_of(subject)
    export.convert(path, scratch, subject, model=None, report=lambda phase, done, of: None)
    return scratch, version


def score_of(dataset: str, lines: list[dict[str, Any]]) -> Score:
    """Mean and standard error over prompts: answers to one prompt are no independent draws of prompts."""
    by_prompt: dict[int, list[float]] = {}
    for line in lines:
        if line["score"] is not None:
            by_prompt.setdefault(line["row"], []).append(line["score"])
    means = [math.fsum(scores) / len(scores) for scores in by_prompt.values()]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    rows = {line["row"] for line in lines}
    return Score(
        dataset=dataset,
        mean=math.fsum(means) / len(means),
        standard_error=error,
        prompts=len(means),
        samples=len(lines) // len(rows),
        failures=sum(line["score"] is None for line in lines),
    )


def as_json(found: Evaluated) -> str:
    return json.dumps(asdict(found), ensure_ascii=False)


def as_text(found: Evaluated) -> str:
    how = f"temperature {found.temperature:g}" if found.temperature else "greedy"
    lines = [f"{found.model}, policy {found.version}: scorer {found.scorer}, {how}, at most {found.max_tokens} tokens"]
    for score in found.scores:
        error = "" if score.standard_error is None else f" ± {score.standard_error:.4f} (standard error)"
        each = "" if score.samples == 1 else f" x {score.samples} answers"
        failed = f", {score.failures} answers could not be scored" if score.failures else ""
        lines.append(f"{score.dataset}: {score.mean:.4f}{error} over {score.prompts} prompts{each}{failed}")
    if found.answers is not None:
        lines.append(f"answers in {found.answers}")
    return "\n".join(lines)


def checked(path: Path, assignments: list[str]) -> Recipe:
    """The recipe, fit to be evaluated with. Raises ConfigError, NoEvaluation."""
    recipe = read_recipe(path, assignments)
    if recipe.coordinator.evaluation is None:
        raise NoEvaluation(f"{path}: coordinator.evaluation: expected held-out prompts, the recipe has none")
    found = problems(recipe, resuming=True) or lacks(recipe)
    if found:
        raise ConfigError("\n".join([f"{path}: {len(found)} problem(s)", *(f"  {line}" for line in found)]))
    return recipe


def _recipe_of(subject: Subject, words: list[str]) -> tuple[Path, list[str]]:
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        return Path(words[0]), words[1:]
    if subject.recipe_path is None:
        raise ConfigError(f"RECIPE: {subject.path} is of no run, whose recipe could be taken; name a recipe after it")
    return subject.recipe_path, words


def _model_path(subject: Subject) -> list[str]:
    """What stands for the weights while they are not there: for a look at everything else, before any is written."""
    if subject.kind == "model":
        return [f"model.path={json.dumps(str(subject.path))}"]
    if subject.kind == "run" and (newest := weights_of_run(subject.path)).exported:
        return [f"model.path={json.dumps(str(newest.path))}"]
    return []


def _new_folder(path: Path) -> Path:
    path = path.expanduser().absolute()
    if os.path.lexists(path) or not path.parent.is_dir():
        raise ConfigError(f"--answers: {path}: expected a new folder in one that is there; name another one")
    return path


def _keep(answers: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    folder.mkdir()
    for dataset, lines in answers.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{dataset}.jsonl").write_text(text, encoding="utf-8")
