"""The process of a reference model without torch: `python -m tests.contract.reference_twin`.

The log-prob of a token is -(its id + the id before it) / temperature. Some tokens make it misbehave.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence

from services.common.errors import ConfigError
from services.reward import reference_child

HANGS, EXITS = 90, 91
TOKENIZER = b"t" * 32


class Twin:
    digest = 77
    tokenizer_digest = TOKENIZER
    vocabulary_size = 100
    max_sequence_tokens = 32

    def __init__(self, path: str, dtype: str, device: str) -> None:
        if "refused" in path:
            raise ConfigError(f"reference {path}: it has no output layer")
        if "breaks" in path:
            raise RuntimeError("no memory for it")

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        print(f"micro-batch of {len(rows)} x {max(map(len, rows))} at {temperature:g}", file=sys.stderr, flush=True)
        for row in rows:
            if HANGS in row:
                time.sleep(1000)
            if EXITS in row:
                os._exit(7)
        return [expected(row, temperature) for row in rows]


def expected(row: Sequence[int], temperature: float) -> list[float]:
    return [0.0, *(-(a + b) / temperature for a, b in itertools.pairwise(row))]


if __name__ == "__main__":
    sys.exit(reference_child.main(Twin))
