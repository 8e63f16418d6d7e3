"""The policy objective on plain transformers and torch, one row at a time in float64: what a learner must equal."""

from __future__ import annotations

import copy
from typing import Any

import torch
from antiphon.learner.v1 import learner_pb2

from tests.unit.learner.batches import CLIP_HIGH, CLIP_LOW


def token_logprobs(model: Any, token_ids: list[int], temperature: float) -> torch.Tensor:
    """[n] log-probs of the tokens of one row, 0 for the first; with gradient."""
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1, dtype=chosen.dtype), chosen])


def entropy_sum(model: Any, row: learner_pb2.TrainTrajectory, temperature: float) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(row.token_ids)]), use_cache=False).logits[0, :-1] / temperature
    p = torch.softmax(logits, -1)
    each = -(p * p.log()).sum(-1)
    return sum(each[i - 1].item() for i, trained in enumerate(row.loss_mask) if trained)


class PlainTrainer:
    """A float64 copy of a model, trained by the formulas of docs/math.md and torch's AdamW."""

    def __init__(self, model: Any, learning_rate: float) -> None:
        self.model = copy.deepcopy(model).double()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.old: dict[str, torch.Tensor] = {}

    def begin_step(self, batch: list[learner_pb2.TrainTrajectory], temperature: float) -> None:
        with torch.no_grad():
            self.old = {
                row.trajectory_id: token_logprobs(self.model, list(row.token_ids), temperature) for row in batch
            }

    def update(
        self, rows: list[learner_pb2.TrainTrajectory], temperature: float, clip_norm: float = 1.0
    ) -> dict[str, Any]:
        """One Update on these rows: metrics, and the gradient before clipping by name."""
        self.optimizer.zero_grad()
        count = sum(sum(row.loss_mask) for row in rows)
        loss, clipped, ratios = torch.zeros((), dtype=torch.float64), 0, []
        for row in rows:
            logprobs = token_logprobs(self.model, list(row.token_ids), temperature)
            for position, trained in enumerate(row.loss_mask):
                if not trained:
                    continue
                ratio = torch.exp(logprobs[position] - self.old[row.trajectory_id][position])
                advantage = row.advantages[position]
                bounded = min(max(ratio.item(), 1 - CLIP_LOW), 1 + CLIP_HIGH)
                is_clipped = bounded * advantage < ratio.item() * advantage
                loss = loss - (bounded * advantage if is_clipped else ratio * advantage)
                clipped += is_clipped
                ratios.append(ratio.item())
        entropy = sum(entropy_sum(self.model, row, temperature) for row in rows) / count
        (loss / count).backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm).item()
        self.optimizer.step()
        return {
            "loss": loss.item() / count,
            "gradient_norm": norm,
            "entropy": entropy,
            "clip_fraction": clipped / count,
            "ratio_mean": sum(ratios) / count,
            "ratio_max": max(ratios),
            "gradients": gradients,
        }
