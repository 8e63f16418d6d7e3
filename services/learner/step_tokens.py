"""The trained tokens of a Step, numbered through: rows for the planner, one tensor of each field for the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from antiphon.learner.v1 import learner_pb2

from services.learner.batching import Row
from services.learner.objectives.kl import LONGEST_LOG_RATIO, k3
from services.learner.objectives.terms import TokenFields
from services.learner.packing import Packed, on_device


class StepTokens:
    """Every trained token of every trajectory, trajectory by trajectory; each tensor has one entry [N] a token.

    Log-probs that were not sent are NaN.
    """

    def __init__(self, trajectories: Sequence[learner_pb2.TrainTrajectory], device: torch.device) -> None:
        self.ids = [trajectory.trajectory_id for trajectory in trajectories]
        self.number_of = {name: number for number, name in enumerate(self.ids)}
        self.rows: list[Row] = []
        """Each trajectory's tokens, and which of them are trained."""
        advantages = [np.empty(0, dtype=np.float32)]
        behavior = [np.empty(0, dtype=np.float32)]
        reference = [np.empty(0, dtype=np.float32)]
        for trajectory in trajectories:
            trained = np.flatnonzero(np.array(trajectory.loss_mask, dtype=bool))
            ids = np.array(trajectory.token_ids, dtype=np.int64)
            self.rows.append(Row(ids, trained))
            advantages.append(np.array(trajectory.advantages, dtype=np.float32)[trained])
            behavior.append(_sent(trajectory.behavior_logprobs, trained))
            reference.append(_sent(trajectory.reference_logprobs, trained))
        self.offsets: list[int] = np.cumsum([0, *(len(row.predicted) for row in self.rows)]).tolist()
        """Number of each trajectory's first trained token, and at the end how many there are."""
        self.count = self.offsets[-1]
        self.advantages = on_device(torch.from_numpy(np.concatenate(advantages)), device)
        self.behavior_logprobs = on_device(torch.from_numpy(np.concatenate(behavior)), device)
        self.reference_logprobs = on_device(torch.from_numpy(np.concatenate(reference)), device)
        self.old_logprobs = torch.zeros(self.count, dtype=torch.float32, device=device)
        """log π at the start of the Step: on each rank what it computed, after `exchange_old_logprobs` all."""
        self.knows_old_logprobs = False

    def fields(self, packed: Packed) -> TokenFields:
        """Of the tokens of a micro-batch; an empty one has one token, masked, whatever that holds."""
        which = packed.numbers
        counts = np.array(packed.counts or (1,), dtype=np.int64)
        device = self.advantages.device
        return TokenFields(
            advantages=self.advantages[which],
            mask=torch.full(which.shape, fill_value=not packed.is_empty, dtype=torch.bool, device=device),
            lengths=on_device(torch.from_numpy(counts), device),
            behavior_logprobs=self.behavior_logprobs[which],
            reference_logprobs=self.reference_logprobs[which],
        )

    def exchange_old_logprobs(self) -> None:
        """Every token was computed by one rank, elsewhere it is 0. A later epoch may give its row to another rank."""
        dist.all_reduce(self.old_logprobs)
        self.knows_old_logprobs = True

    def fill_behavior(self, result: learner_pb2.StepResult) -> None:
        """How far the policy at the start is from the one that sampled; all 0 where no behaviour log-prob was sent."""
        sent = ~torch.isnan(self.behavior_logprobs)
        d = torch.where(sent, self.old_logprobs - self.behavior_logprobs, 0.0).double()
        d = d.clamp(-LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)
        each = (sent.double(), d.abs(), d.exp() * sent, k3(-d))
        tokens, difference, ratio, kl = torch.stack([value.sum() for value in each]).tolist()
        if tokens:
            result.behavior_difference = difference / tokens
            result.behavior_ratio = ratio / tokens
            result.mismatch_kl_k3 = kl / tokens

    def rows_of(self, flags: torch.Tensor) -> set[int]:
        """Numbers of the trajectories with a token that is flagged."""
        found = np.flatnonzero(flags.cpu().numpy())
        return set((np.searchsorted(self.offsets, found, side="right") - 1).tolist())


def _sent(logprobs: Sequence[float], trained: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Of the trained tokens; NaN where none was sent."""
    if not logprobs:
        return np.full(len(trained), np.nan, dtype=np.float32)
    return np.array(logprobs, dtype=np.float32)[trained]
