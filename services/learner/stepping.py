"""One Step on one rank: its Updates, their micro-batches, the optimizer, and what they saw.

Every rank is given the whole Step and plans it alike, so nobody has to tell another what to do. What an Update sums is
divided once, by the Update's token count over all ranks and micro-batches (docs/math.md, "Policy loss"); so the
gradient is the same, to rounding, however the rows are cut.

Nothing between two micro-batches waits for the device: what is seen is summed there, and read once per Update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from antiphon.learner.v1 import checkpoint_pb2, learner_pb2

from services.common.errors import InvalidRequest
from services.learner.batching import Layout, MicroBatch, plan_micro_batches
from services.learner.config import OptimizerConfig
from services.learner.objectives import objective_of
from services.learner.objectives.terms import Objective
from services.learner.packing import Packed, on_device, pack
from services.learner.schedule import learning_rate
from services.learner.step_tokens import StepTokens
from services.learner.trainer import Report
from services.learner.update_sums import UpdateSums

SKIPS_IN_A_ROW = 3
"""So many Updates without a finite gradient, one after the other, end the run."""

Plan = tuple[list[int], list[MicroBatch]]
"""The rows of an Update, by number in the Step, and one rank's micro-batches of them."""


class StepRunner:
    """Applies Steps to a DeepSpeed engine around a PolicyModel."""

    def __init__(
        self,
        engine: Any,
        options: OptimizerConfig,
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        token_budget: int,
        layout: Layout,
    ) -> None:
        self._engine = engine
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self.token_budget = token_budget
        self.layout = layout
        self._updates_done = 0
        self._skipped_ids: list[list[str]] = []
        self._longest: tuple[int, int] | None = None
        """Tokens and number of the longest row of the micro-batch under way."""

    def position(self) -> checkpoint_pb2.TrainingPosition:
        """Where the schedule stands, and which of the newest Updates were skipped: a checkpoint keeps it."""
        skipped = [checkpoint_pb2.SkippedUpdate(trajectory_ids=ids) for ids in self._skipped_ids]
        return checkpoint_pb2.TrainingPosition(updates=self._updates_done, skipped=skipped)

    def restore(self, position: checkpoint_pb2.TrainingPosition) -> None:
        """Goes on from there."""
        self._updates_done = position.updates
        self._skipped_ids = [list(skipped.trajectory_ids) for skipped in position.skipped]

    def run(
        self,
        header: learner_pb2.StepHeader,
        trajectories: Sequence[learner_pb2.TrainTrajectory],
        report: Report,
    ) -> learner_pb2.StepResult:
        """Applies a Step that was checked (services/learner/batch_checks.py). The same result in every rank.

        Raises InvalidRequest, naming trajectories, when the third Update in a row has no finite gradient. When the
        device has too little memory the rank is lost: gradients are summed in part, perhaps Updates were applied.
        """
        tokens = StepTokens(trajectories, self._device)
        try:
            return self._applied(header, tokens, report)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(self._too_large(header.step_id, tokens, error)) from error

    def _applied(self, header: learner_pb2.StepHeader, tokens: StepTokens, report: Report) -> learner_pb2.StepResult:
        begin = time.monotonic()
        objective = objective_of(header)
        result = learner_pb2.StepResult(step_id=header.step_id)
        plans = [self._planned(tokens, update.trajectory_ids) for update in header.updates]
        if len(plans) > 1:
            self._compute_old_logprobs(plans, tokens, objective, report)
        for number, plan in enumerate(plans, start=1):
            phase = f"update {number}/{len(plans)}"
            metrics = self._update(plan, tokens, objective, partial(report, phase))
            result.updates.append(metrics)
            if len(self._skipped_ids) >= SKIPS_IN_A_ROW:
                self._give_up(header.step_id, result)
        if len(plans) == 1:
            tokens.exchange_old_logprobs()
        tokens.fill_behavior(result)
        result.seconds = time.monotonic() - begin
        return result

    def _planned(self, tokens: StepTokens, trajectory_ids: Sequence[str]) -> Plan:
        members = [tokens.number_of[i] for i in trajectory_ids]
        plan = plan_micro_batches(
            [tokens.rows[number] for number in members],
            ranks=self._ranks,
            token_budget=self.token_budget,
            layout=self.layout,
        )
        return members, plan[self._rank]

    @torch.no_grad()
    def _compute_old_logprobs(
        self, plans: list[Plan], tokens: StepTokens, objective: Objective, report: Report
    ) -> None:
        """log π_old of every trained token, in the micro-batches the first Update with that row will use."""
        known: set[int] = set()
        for number, (members, micro_batches) in enumerate(plans, start=1):
            new = set(members) - known
            known |= new
            if not new:
                continue
            for done, micro_batch in enumerate(micro_batches, start=1):
                logprobs, _, packed = self._computed(tokens, members, micro_batch, objective.temperature)
                if not packed.is_empty:
                    # Rows seen before keep what their own first Update will repeat bit by bit.
                    is_new = np.repeat([members[row] in new for row in packed.rows], packed.counts)
                    fresh = on_device(torch.from_numpy(is_new), self._device)
                    kept = tokens.old_logprobs[packed.numbers]
                    tokens.old_logprobs[packed.numbers] = torch.where(fresh, logprobs, kept)
                report(f"old log-probs {number}/{len(plans)}", done, len(micro_batches))
        tokens.exchange_old_logprobs()

    def _update(
        self, plan: Plan, tokens: StepTokens, objective: Objective, report: Callable[[int, int], None]
    ) -> learner_pb2.UpdateMetrics:
        members, micro_batches = plan
        lengths = [len(tokens.rows[number].predicted) for number in members]
        divisor = objective.divisor(sum(lengths), sum(length > 0 for length in lengths))
        seen = UpdateSums(self._device)
        not_finite = torch.zeros(tokens.count, dtype=torch.int32, device=self._device)
        report(0, len(micro_batches))
        for done, micro_batch in enumerate(micro_batches, start=1):
            logprobs, entropies, packed = self._computed(tokens, members, micro_batch, objective.temperature)
            which = packed.numbers
            if not tokens.knows_old_logprobs and not packed.is_empty:
                tokens.old_logprobs[which] = logprobs.detach()
            terms = objective.terms(logprobs, entropies, tokens.old_logprobs[which], tokens.fields(packed))
            # ZeRO averages over the ranks what we want summed.
            self._engine.backward(terms.loss.sum() * (self._ranks / divisor))
            if not packed.is_empty:
                seen.add(terms, entropies)
                not_finite[which] |= ~(torch.isfinite(logprobs.detach()) & torch.isfinite(terms.loss.detach()))
            report(done, len(micro_batches))
        rate = learning_rate(self._options, self._updates_done)
        skipped, norm = self._optimizer_step(rate)
        self._note_skip(skipped, members, tokens, not_finite)
        metrics = seen.metrics(sum(lengths), divisor)
        metrics.gradient_norm, metrics.learning_rate, metrics.skipped = norm, rate, skipped
        return metrics

    def _computed(
        self, tokens: StepTokens, members: list[int], micro_batch: MicroBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, Packed]:
        """Log-probs and entropies [T] of a micro-batch, and how it was packed; `numbers` are the Step's."""
        rows = [tokens.rows[number] for number in members]
        offsets = [tokens.offsets[number] for number in members]
        packed = pack(micro_batch, rows, self.layout, self._device, offsets)
        self._longest = max(((len(rows[row].token_ids), members[row]) for row in packed.rows), default=None)
        logprobs, entropies = self._engine(packed, temperature)
        return logprobs, entropies, packed

    def _too_large(self, step_id: int, tokens: StepTokens, error: torch.OutOfMemoryError) -> str:
        row = "" if self._longest is None else f", its longest row {tokens.ids[self._longest[1]]} of {self._longest[0]}"
        return (
            f"step {step_id}: too little GPU memory for a micro-batch; settings.micro_batch_tokens is "
            f"{self.token_budget}{row}: make it smaller, or set settings.gradient_checkpointing. The step was applied "
            f"in part or not at all, the weights are lost: {error}"
        )

    def _optimizer_step(self, rate: float) -> tuple[bool, float]:
        """Clips and steps, or leaves weights and optimizer state as they are where the norm is not finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        self._updates_done += 1
        norm = float(self._engine.get_global_grad_norm())
        return not self._engine.was_step_applied(), norm if norm >= 0 else math.nan

    def _note_skip(self, skipped: bool, members: list[int], tokens: StepTokens, not_finite: torch.Tensor) -> None:
        if not skipped:
            self._skipped_ids.clear()
            return
        dist.all_reduce(not_finite, op=dist.ReduceOp.MAX)
        guilty = tokens.rows_of(not_finite) & set(members)
        self._skipped_ids.append([tokens.ids[number] for number in (guilty or members)])

    def _give_up(self, step_id: int, result: learner_pb2.StepResult) -> None:
        ids = sorted({i for skipped in self._skipped_ids for i in skipped})
        shown = ", ".join(ids[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
        text = f"step {step_id}: {SKIPS_IN_A_ROW} Updates in a row had no finite gradient; trajectories {shown}"
        if any(not metrics.skipped for metrics in result.updates):
            raise RuntimeError(f"{text}; the step was applied in part, its weights are no policy")
        raise InvalidRequest(f"{text}; the policy is still version {step_id - 1}")
