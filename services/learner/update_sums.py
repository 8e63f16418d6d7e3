"""What an Update saw, summed on the device over its micro-batches, and over the ranks at its end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from antiphon.learner.v1 import learner_pb2

from services.learner.objectives.terms import TokenTerms

SUMS = ("loss", "entropy", "clipped", "ratio", "weight", "weight_squared", "silenced", "kl")


class UpdateSums:
    """Nothing here waits for the device before `metrics`."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=device)  # ratio, weight

    def add(self, terms: TokenTerms, entropies: torch.Tensor) -> None:
        """One micro-batch that has rows."""
        nothing = torch.zeros_like(terms.ratio)
        weights = nothing if terms.weights is None else terms.weights
        seen = (
            terms.loss.detach(),
            entropies.detach(),
            terms.clipped,
            terms.ratio,
            weights,
            weights * weights,
            nothing if terms.silenced is None else terms.silenced,
            nothing if terms.kl is None else terms.kl,
        )
        self._sums += torch.stack([values.double().sum() for values in seen])
        largest = torch.stack([terms.ratio.double().max(), weights.double().max()])
        self._largest = torch.maximum(self._largest, largest)

    def metrics(self, tokens: int, divisor: float) -> learner_pb2.UpdateMetrics:
        """Over all ranks, of an Update of so many tokens whose loss is divided by `divisor`. Every rank calls it."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found = dict(zip(SUMS, self._sums.tolist(), strict=True))
        ratio_max, weight_max = self._largest.tolist()
        squared = found["weight_squared"]
        return learner_pb2.UpdateMetrics(
            loss=found["loss"] / divisor,
            entropy=found["entropy"] / tokens,
            clip_fraction=found["clipped"] / tokens,
            ratio_mean=found["ratio"] / tokens,
            ratio_max=ratio_max,
            tokens=tokens,
            correction_mean=found["weight"] / tokens,
            correction_max=weight_max,
            effective_share=found["weight"] ** 2 / squared / tokens if squared else 0.0,
            silenced_share=found["silenced"] / tokens,
            kl=found["kl"] / tokens,
        )
