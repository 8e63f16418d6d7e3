"""A scorer that is the weighted sum of other scorers of the same worker: Σ weight · score.

| a part…                                   | then the whole…                                                        |
|-------------------------------------------|------------------------------------------------------------------------|
| scores                                    | has it in the sum, and its score among the named parts, unweighted     |
| does not apply (answered None)            | is the sum of the others; it has no such part                          |
| fails by its data (NaN, exception, …)     | fails by its data                                                      |
| fails by the machinery (its child died)   | fails by the machinery, whatever the others did: asking again may help |

When no part applies the whole does not either ("none"): it is not 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from antiphon.reward.v1 import reward_pb2

from services.reward import config
from services.reward.scorer import DATA, INFRA, Outcome, Scorer, failed, full_name


class CompositeScorer:
    """Its parts are scorers of the set, which starts and closes them."""

    signature = "antiphon"

    def __init__(self, settings: config.CompositeScorer, others: Mapping[str, Scorer]) -> None:
        """`others`: the scorers that can be parts, by name."""
        self.name = settings.name
        self._weights = settings.parts
        self._parts = {name: others[name] for name in settings.parts}
        self.whole_groups = any(part.whole_groups for part in self._parts.values())
        self.concurrency = max(part.concurrency for part in self._parts.values())
        weights = {full_name(self._parts[name]): weight for name, weight in settings.parts.items()}
        text = json.dumps(weights, sort_keys=True)
        self.version = settings.version or hashlib.sha256(text.encode()).hexdigest()[:8]

    async def start(self) -> None:
        """Nothing of its own."""

    async def score(self, candidates: Sequence[reward_pb2.Candidate]) -> list[Outcome]:
        """One outcome per candidate, in their order."""
        by_part = await asyncio.gather(*(part.score(candidates) for part in self._parts.values()))
        rows = zip(*by_part, strict=True)
        return [combined(dict(zip(self._parts, row, strict=True)), self._weights) for row in rows]

    def problem(self) -> str | None:
        return next((f"part {name}: {p}" for name, s in self._parts.items() if (p := s.problem()) is not None), None)

    async def close(self) -> None:
        """Nothing of its own."""


def combined(outcomes: Mapping[str, Outcome], weights: Mapping[str, float]) -> Outcome:
    """The outcome of the whole from those of its parts, by name."""
    failures = {name: o for name, o in outcomes.items() if isinstance(o, reward_pb2.ScoreFailure)}
    abstained = [name for name, failure in failures.items() if failure.kind == DATA and failure.reason == "none"]
    serious = {name: failure for name, failure in failures.items() if name not in abstained}
    if serious:
        infra = {name: failure for name, failure in serious.items() if failure.kind != DATA}
        name, first = next(iter((infra or serious).items()))
        kind = INFRA if infra else DATA
        return failed(kind, first.reason, f"part {name!r}: {first.message}{_others(serious, name)}")
    scores = {name: o for name, o in outcomes.items() if isinstance(o, reward_pb2.Score)}
    if not scores:
        return failed(DATA, "none", f"no part applies to this candidate: {', '.join(abstained)} answered None")
    try:
        value = math.fsum(weights[name] * score.value for name, score in scores.items())
    except (OverflowError, ValueError):  # what fsum raises in place of an infinity, and for opposite ones
        value = math.nan
    if not math.isfinite(value):
        told = ", ".join(f"{weights[name]:g} x {score.value:g}" for name, score in scores.items())
        return failed(DATA, "not_finite", f"the weighted sum is not finite: {told}")
    whole = reward_pb2.Score(value=value)
    for name, score in scores.items():
        whole.parts.add(name=name, value=score.value)
        for inner in score.parts:
            whole.parts.add(name=f"{name}/{inner.name}", value=inner.value)
    return whole


def _others(serious: Mapping[str, reward_pb2.ScoreFailure], name: str) -> str:
    others = [f"{other} ({failure.reason})" for other, failure in serious.items() if other != name]
    return f"\n(other parts that failed: {', '.join(others)})" if others else ""
