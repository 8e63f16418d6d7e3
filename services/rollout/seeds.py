"""The seed of a sample: a function of what the sample is, never of where or when it is drawn."""

from __future__ import annotations

import hashlib

from antiphon.types.v1.trajectory_pb2 import PromptId


def sample_seed(run_seed: int, prompt_id: PromptId, sample_number: int, policy_version: int) -> int:
    """0 <= seed < 2^63, the first 63 bits of SHA-256 over all arguments.

    The same run gives the same seeds on any number of engines; siblings, rows, epochs and policies all get others.
    """
    parts = (run_seed, prompt_id.dataset, prompt_id.row, prompt_id.epoch, sample_number, policy_version)
    text = "\x1f".join(str(part) for part in parts)  # numbers hold no separator, and only one part is text
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
