"""Writes the data of the demo, sums of two numbers from 11 to 59, as data/addition/{train,heldout}.jsonl.

    python recipes/demo/make_data.py [FOLDER]

Sums are held out by pair of numbers, in both orders, so no training prompt has the answer to a held-out one turned
around. The split is a function of the seed alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

FOLDER = Path("data/addition")
NUMBERS = range(11, 60)
HELDOUT = 256
SEED = 20


def make(seed: int = SEED) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training rows, held-out rows), each {prompt, reference}. Of 256 pairs one order is held out, one left out."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    chooser = random.Random(seed)
    chooser.shuffle(pairs)
    heldout = [chooser.choice([(a, b), (b, a)]) for a, b in pairs[:HELDOUT]]
    training = sorted({order for a, b in pairs[HELDOUT:] for order in [(a, b), (b, a)]})
    return [_row(*pair) for pair in training], [_row(*pair) for pair in heldout]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"data: {path}: {len(rows)} prompts")


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"Question: What is {a} + {b}?\nAnswer:", "reference": str(a + b)}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    training, heldout = make()
    write(folder / "train.jsonl", training)
    write(folder / "heldout.jsonl", heldout)


if __name__ == "__main__":
    main()
