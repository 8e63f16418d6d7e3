"""What stands in for weights: a pure function from (token ids, version) to log-probabilities that both ends share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from antiphon.types.v1 import policy_pb2

WEIGHTS = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "lm_head.weight"]
PROBE = [1, 2, 3, 4]


def logprobs(token_ids: Sequence[int], version: int) -> list[float]:
    """One per token, 0 for the first; between -2.5 and -0.5."""
    values = [0.0]
    for t in range(1, len(token_ids)):
        seed = f"{version}/{token_ids[t - 1]}/{token_ids[t]}".encode()
        values.append(-0.5 - hashlib.sha256(seed).digest()[0] / 128.0)
    return values


def policy(version: int) -> policy_pb2.Policy:
    """The policy of a version, with its digest."""
    digest = int.from_bytes(hashlib.sha256(f"weights of {version}".encode()).digest()[:8], "big")
    return policy_pb2.Policy(version=version, digest=digest)
