"""A recipe for runs with stand-ins; the model is a folder of next to nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADER = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)
"""One tensor of one element, as safetensors has it."""


def write_recipe(folder: Path) -> Path:
    """Writes recipe.yaml of a run "story" and every file that it names into the folder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "train.jsonl").write_text('{"prompt": "a", "reference": "b"}\n')
    (folder / "reward.py").write_text("def score(prompt, response, reference): return 1.0\n")
    tree: dict[str, Any] = {
        "run": {"name": "story", "seed": 7},
        "model": {"path": "model", "dtype": "float32"},
        "coordinator": {
            "steps": 2,
            "data": {"path": "train.jsonl"},
            "sampling": {"max_tokens": 16},
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "scorer": "exact",
        },
        "rollout": {},
        "reward": {"scorers": [{"name": "exact", "path": "reward.py"}]},
        "learner": {},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path
