"""The two ways in which a trainer runs Steps: with a place in the run that a checkpoint keeps, and without effect."""

from __future__ import annotations

import torch
from antiphon.learner.v1 import checkpoint_pb2

from services.learner.step_tokens import StepTokens
from services.learner.stepping import StepRunner


class ResumableStepRunner(StepRunner):
    """Knows where the schedule stands and which of the newest Updates were skipped, and goes on from there."""

    def position(self) -> checkpoint_pb2.TrainingPosition:
        skipped = [checkpoint_pb2.SkippedUpdate(trajectory_ids=ids) for ids in self._skipped_ids]
        return checkpoint_pb2.TrainingPosition(updates=self._updates_done, skipped=skipped)

    def restore(self, position: checkpoint_pb2.TrainingPosition) -> None:
        self._updates_done = position.updates
        self._skipped_ids = [list(skipped.trajectory_ids) for skipped in position.skipped]


class DryStepRunner(StepRunner):
    """Computes every Update of a Step and applies none: what does not fit shows before it can cost anything.

    Forward, backward and the sums of gradients are those of a real Step; weights, moments and schedule stay as they
    are. The memory that an Update takes for a moment, the float32 gradient of a group, is taken and given back.
    """

    def _optimizer_step(self, rate: float) -> tuple[bool, float]:
        zero = self._engine.optimizer
        largest = max(master.numel() for master in zero.fp32_partitioned_groups_flat)
        torch.empty(largest, dtype=torch.float32, device=self._device)
        zero.zero_grad()  # the next backward begins a new sum
        return False, 0.0

    def _too_large(self, step_id: int, tokens: StepTokens, error: torch.OutOfMemoryError) -> str:
        return f"dry run, nothing was applied before it: {super()._too_large(step_id, tokens, error)}"
