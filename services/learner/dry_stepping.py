"""Steps without effect: what does not fit shows before it can cost anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.learner.batching import Layout, MicroBatch
from services.learner.step_tokens import StepTokens
from services.learner.stepping import Plan, StepRunner


class DryStepRunner(StepRunner):
    """Computes the largest micro-batch of each Update of a Step, and applies none: the others take no more memory.

    Forward, backward and the sums of gradients are those of a real Step; weights, moments and schedule stay as they
    are. The memory that an Update takes for a moment, the float32 gradient of a group, is taken and given back.
    """

    def _planned(self, tokens: StepTokens, trajectory_ids: Sequence[str]) -> Plan:
        members, micro_batches = super()._planned(tokens, trajectory_ids)
        # Each rank computes one, as ZeRO-3 wants it.
        return members, [max(micro_batches, key=self._tokens)]

    def _tokens(self, micro_batch: MicroBatch) -> int:
        """That go through the model together, padding counted."""
        lengths = [line.length for line in micro_batch]
        return sum(lengths) if self.layout is Layout.ONE_LINE else len(lengths) * max(lengths, default=0)

    def _optimizer_step(self, rate: float) -> tuple[bool, float]:
        zero = self._engine.optimizer
        largest = max(master.numel() for master in zero.fp32_partitioned_groups_flat)
        torch.empty(largest, dtype=torch.float32, device=self._device)
        zero.zero_grad()  # the next backward begins a new sum
        return False, 0.0

    def _too_large(self, step_id: int, tokens: StepTokens, error: torch.OutOfMemoryError) -> str:
        return f"dry run, nothing was applied before it: {super()._too_large(step_id, tokens, error)}"
