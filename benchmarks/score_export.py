"""Scores an exported policy by plain transformers, as far from our own code as can be: no engine, no service.

    python -m benchmarks.score_export RUN_DIR

Reads the recipe kept with the run, answers its held-out prompts greedily with export/policy-N, grades with the recipe's
own reward file, and compares with the run's last evaluation. Exit code 1 when they differ by more than 0.02.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TOLERANCE = 0.02
BATCH = 32


@dataclass(frozen=True)
class Scored:
    """An export and what the run said of it."""

    scores: list[float]
    """By plain transformers, a score per held-out prompt in file order."""
    reported: list[float | None]
    """By the run's last evaluation."""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def reported_mean(self) -> float:
        known = [score for score in self.reported if score is not None]
        return sum(known) / len(known)


def score_export(run_dir: Path) -> Scored:
    """Loads the model and generates; a minute or so for the demo."""
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    coordinator = recipe["coordinator"]
    evaluation, data = coordinator["evaluation"], coordinator["data"]
    export = max((run_dir / "export").glob("policy-*"), key=_version)
    scorer = next(s for s in recipe["reward"]["scorers"] if s["name"] == coordinator["scorer"].partition("@")[0])
    rows = [json.loads(line) for line in Path(evaluation["path"]).read_text().splitlines()]
    named = {role: name for role, name in data["columns"].items() if name != "auto"}
    prompts = [row.pop(named.get("prompt", "prompt")) for row in rows]
    references = [str(row.pop(named.get("reference", "reference"))) for row in rows]
    answers = _answer(export, recipe["model"]["dtype"], prompts, data["format"], evaluation["max_tokens"])
    score = getattr(_load(Path(scorer["path"])), scorer["function"])
    scores = [
        float(score(prompt=str(prompt), response=answer, reference=reference, **row))
        for prompt, answer, reference, row in zip(prompts, answers, references, rows, strict=True)
    ]
    reported = run_dir / "evaluations" / f"{evaluation['name']}-v{_version(export)}.jsonl"
    return Scored(scores, [json.loads(line)["score"] for line in reported.read_text().splitlines()])


def _version(export: Path) -> int:
    return int(export.name.rpartition("-")[2])


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward_of_the_recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(folder: Path, dtype: str, prompts: list[Any], form: str, max_tokens: int) -> list[str]:
    """Greedy answers, by transformers' own generate; prompts of one length go together, so nothing is padded."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    encoded: list[list[int]] = []
    for prompt in prompts:
        if form == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            encoded.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        else:
            encoded.append(tokenizer(prompt)["input_ids"])
    answers = [""] * len(prompts)
    for length in sorted({len(ids) for ids in encoded}):
        places = [place for place, ids in enumerate(encoded) if len(ids) == length]
        for start in range(0, len(places), BATCH):
            chosen = places[start : start + BATCH]
            ids = torch.tensor([encoded[place] for place in chosen])
            with torch.inference_mode():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
                )
            texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
            for place, text in zip(chosen, texts, strict=True):
                answers[place] = text
    return answers


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.score_export RUN_DIR")
    scored = score_export(Path(sys.argv[1]))
    difference = scored.mean - scored.reported_mean
    print(f"{len(scored.scores)} prompts: transformers {scored.mean:.4f}, the run's engine {scored.reported_mean:.4f}")
    if abs(difference) > TOLERANCE:
        sys.exit(f"score_export: they differ by {difference:+.4f}, more than {TOLERANCE}")


if __name__ == "__main__":
    main()
