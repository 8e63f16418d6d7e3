"""`antiphon generate`: answers of a model, a checkpoint or the newest policy of a run to prompts on the command line.

What a prompt becomes is what it would be in training: by the chat template, or as it is, as the run's recipe says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from services.cli import errand
from services.cli.evaluate import weights
from services.cli.preflight import lacks
from services.cli.recipe import Recipe, problems, read_recipe
from services.cli.subject import Subject, find_subject, weights_of_run
from services.common.config import parse
from services.common.errors import ConfigError

RENDERING = (
    "format", "template", "chat_template_kwargs", "system_prompt", "input_template", "add_special_tokens"
)  # fmt: skip
"""Of coordinator.data: what becomes of a prompt."""
ROOM_TOKENS = 2048
"""Of prompt and answer, where the model has it and no recipe says otherwise."""
DTYPES = ("float32", "bfloat16")
Format = Literal["chat", "text"]


@dataclass(frozen=True)
class Answer:
    """One. Example: "What is 2 + 3?", sample 0, "5", 2 tokens, ended by a stop token."""

    prompt: str
    sample: int
    response: str
    tokens: int
    finish_reason: str
    rendered: str
    """What the model saw, special tokens included."""


def generate(
    named: Path,
    prompts: list[str],
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    dtype: str | None,
    format: Format | None,
    quiet: bool,
    modules: Mapping[str, str] | None = None,
) -> list[Answer]:
    """By prompt, then by sample. Raises ConfigError, RunFailed, Interrupted."""
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ConfigError("PROMPT: expected words, got an empty prompt" if prompts else "PROMPT: expected at least one")
    if samples > 1 and not temperature:
        raise ConfigError(f"--n: {samples} greedy answers to a prompt are all the same; say --temperature 1, or --n 1")
    subject = find_subject(named)
    if subject.kind == "run":
        _ = weights_of_run(subject.path)
    with errand.scratch("generate") as folder:
        services = folder / "services"
        services.mkdir()
        lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
        (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        evaluation = {"path": str(folder / "prompts.jsonl"), "max_tokens": max_tokens, "temperature": temperature}
        evaluation |= {"samples": samples, "columns": {"prompt": "prompt", "reference": None}}
        given = {"dtype": dtype, "format": format, "seed": seed}
        # Everything but weights that are still in a checkpoint is looked at before they are written.
        recipe = _recipe(subject, subject.path if subject.kind == "model" else None, evaluation, given, folder)
        model, _ = weights(subject, folder / "model")
        if subject.kind != "model":
            recipe = _recipe(subject, model, evaluation, given, folder)
        found = errand.answers(recipe, services, score=False, quiet=quiet, modules=modules)
    (lines_of,) = found.values()
    return [
        Answer(
            prompt=prompts[line["row"]],
            sample=line["sample"],
            response=line["response"],
            tokens=line["tokens"],
            finish_reason=line["finish_reason"].removeprefix("FINISH_REASON_").lower(),
            rendered=line["prompt"],
        )
        for line in lines_of
    ]


def as_json(answers: list[Answer]) -> str:
    """A line each."""
    return "\n".join(json.dumps(asdict(answer), ensure_ascii=False) for answer in answers)


def as_text(answers: list[Answer]) -> str:
    """The answer alone where there is one; else under its prompt."""
    if len(answers) == 1:
        return answers[0].response
    lines: list[str] = []
    for answer in answers:
        if answer.sample == 0:
            lines += ([""] if lines else []) + [f"> {answer.prompt}"]
        lines.append(f"[{answer.sample}] {answer.response}")
    return "\n".join(lines)


def _recipe(
    subject: Subject, model: Path | None, evaluation: dict[str, Any], given: dict[str, Any], folder: Path
) -> Recipe:
    """That of the run, or one of defaults, with these prompts as held-out ones. Raises ConfigError."""
    own = read_recipe(subject.recipe_path, []) if subject.recipe_path is not None else None
    path = model if model is not None else Path(own.model.path) if own is not None else subject.path
    config = _config(path)
    limit = config.get("max_position_embeddings")
    room = ROOM_TOKENS if own is None else own.rollout.max_sequence_tokens
    room = max(room, evaluation["max_tokens"] + 1)
    room = min(room, limit) if isinstance(limit, int) else room
    if evaluation["max_tokens"] >= room:
        raise ConfigError(
            f"--max-tokens: {evaluation['max_tokens']} leaves no room for a prompt: the model takes {room} tokens in "
            f"all; at most {room - 1}"
        )
    data: dict[str, Any] = {"path": evaluation["path"], "max_prompt_tokens": room - evaluation["max_tokens"]}
    data["columns"] = evaluation["columns"]
    if own is not None and given["format"] in (None, own.coordinator.data.format):
        data |= {key: getattr(own.coordinator.data, key) for key in RENDERING}
    else:
        data["format"] = given["format"] or ("chat" if _has_template(path) else "text")
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    dtype = given["dtype"] or (own.model.dtype if own is not None else said if said in DTYPES else "bfloat16")
    rollout = {} if own is None else own.rollout.model_dump()
    tree = {
        "run": {"name": "generate", "directory": str(folder), "seed": given["seed"]},
        "model": {"path": str(path), "dtype": dtype},
        "coordinator": {
            "steps": 1,
            "data": data,
            "sampling": {"max_tokens": evaluation["max_tokens"]},
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "scorer": "nobody",
            "evaluation": evaluation,
        },
        "rollout": {**rollout, "max_sequence_tokens": room},
        "reward": {"scorers": [{"name": "nobody", "type": "exact_match"}]},
        "learner": {} if own is None else own.learner.model_dump(),
    }
    recipe = parse(Recipe, tree, "generate")
    found = problems(recipe, resuming=True) or lacks(recipe)
    if found:
        raise ConfigError("\n".join([f"{subject.path}: {len(found)} problem(s)", *(f"  {line}" for line in found)]))
    return recipe


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # `problems` names it
    return config if isinstance(config, dict) else {}


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
