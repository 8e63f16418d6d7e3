"""The task of the tiny model: write three letters backwards. Tempting is to write them as they are."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

LETTERS = "abcdefghij"
REWARD_FILE = Path(__file__).with_name("reward.py")
MAX_ANSWER_TOKENS = 4  # three letters and the end


@dataclass(frozen=True)
class Example:
    """One row of the data files."""

    prompt: str
    reference: str
    tempting: str
    """The wrong answer that pre-training makes likelier than the right one."""


def make_examples(seed: int = 0, heldout_count: int = 200) -> tuple[list[Example], list[Example]]:
    """(training, held-out): together all 1,000 prompts, shuffled by seed, none in both."""
    prompts = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    random.Random(seed).shuffle(prompts)
    examples = [Example(prompt, prompt[::-1], prompt) for prompt in prompts]
    return examples[heldout_count:], examples[:heldout_count]


def write_jsonl(path: Path, examples: list[Example]) -> Path:
    path.write_text("".join(json.dumps(asdict(example)) + "\n" for example in examples))
    return path
