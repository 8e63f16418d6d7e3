"""One Step on one rank: its Updates, their micro-batches, the optimizer, and what they saw.

Every rank is given the whole Step and plans it alike, so nobody has to tell another what to do. What an Update sums is
divided once, by the Update's token count over all ranks and micro-batches (docs/math.md, "Policy loss"); so the
gradient is the same, to rounding, however the rows are cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from antiphon.learner.v1 import learner_pb2

from services.common.errors import InvalidRequest
from services.learner.batching import MicroBatch, Row, plan_micro_batches
from services.learner.config import OptimizerConfig
from services.learner.objectives import objective_of
from services.learner.objectives.terms import Objective, TokenFields
from services.learner.packing import Packed, pack
from services.learner.schedule import learning_rate
from services.learner.trainer import Report

SKIPS_IN_A_ROW = 3
"""So many Updates without a finite gradient, one after the other, end the run."""
LONGEST_LOG_RATIO = 20.0
"""k3 clamps the difference of two log-probs to it before the exponential (docs/math.md, "KL to the reference")."""


@dataclass
class _Trained:
    """The trained tokens of one trajectory, in order of position."""

    row: Row
    trajectory_id: str
    advantages: torch.Tensor
    behavior_logprobs: torch.Tensor | None
    old_logprobs: torch.Tensor | None = None
    """At the start of the Step; None until computed."""


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
        share_contexts: bool,
    ) -> None:
        self._engine = engine
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self.token_budget = token_budget
        self.share_contexts = share_contexts
        self._updates_done = 0
        self._skipped_ids: list[list[str]] = []

    def run(
        self,
        header: learner_pb2.StepHeader,
        trajectories: Sequence[learner_pb2.TrainTrajectory],
        report: Report,
    ) -> learner_pb2.StepResult:
        """Applies a Step that was checked (services/learner/batch_checks.py). The same result in every rank.

        Raises InvalidRequest, naming trajectories, when the third Update in a row has no finite gradient.
        """
        begin = time.monotonic()
        objective = objective_of(header)
        trained = {t.trajectory_id: _trained(t) for t in trajectories}
        result = learner_pb2.StepResult(step_id=header.step_id)
        behavior = _BehaviorSums()
        plans = [self._planned([trained[i] for i in update.trajectory_ids]) for update in header.updates]
        if len(plans) > 1:
            self._compute_old_logprobs(plans, list(trained.values()), objective, behavior, report)
        for number, (update, plan) in enumerate(zip(header.updates, plans, strict=True), start=1):
            phase = f"update {number}/{len(plans)}"
            first_look = None if len(plans) > 1 else behavior
            result.updates.append(self._update(plan, objective, update.token_count, first_look, partial(report, phase)))
            if len(self._skipped_ids) >= SKIPS_IN_A_ROW:
                self._give_up(header.step_id, result)
        behavior.fill(result, self._device)
        result.seconds = time.monotonic() - begin
        return result

    def _planned(self, members: list[_Trained]) -> tuple[list[_Trained], list[MicroBatch]]:
        """The rows of an Update and this rank's micro-batches of them."""
        plan = plan_micro_batches(
            [member.row for member in members],
            ranks=self._ranks,
            token_budget=self.token_budget,
            share_contexts=self.share_contexts,
        )
        return members, plan[self._rank]

    @torch.no_grad()
    def _compute_old_logprobs(
        self,
        plans: list[tuple[list[_Trained], list[MicroBatch]]],
        everything: list[_Trained],
        objective: Objective,
        behavior: _BehaviorSums,
        report: Report,
    ) -> None:
        """log π_old of every trained token, in the micro-batches the first Update with that row will use."""
        known: set[str] = set()
        for number, (members, micro_batches) in enumerate(plans, start=1):
            new = {member.trajectory_id for member in members} - known
            known |= new
            if not new:
                continue
            for done, micro_batch in enumerate(micro_batches, start=1):
                packed, mine = self._packed(members, micro_batch)
                logprobs, _ = self._engine(packed, objective.temperature)
                parts = logprobs.split(packed.counts) if mine else ()
                for member, part in zip(mine, parts, strict=True):
                    if member.trajectory_id in new:
                        member.old_logprobs = part
                        behavior.add(member, part)
                report(f"old log-probs {number}/{len(plans)}", done, len(micro_batches))
        self._exchange_old_logprobs(everything)

    def _exchange_old_logprobs(self, everything: list[_Trained]) -> None:
        """A later epoch may give a row to another rank than the one that computed it."""
        counts = [len(member.row.predicted) for member in everything]
        flat = torch.zeros(sum(counts), dtype=torch.float32, device=self._device)
        for member, part in zip(everything, flat.split(counts), strict=True):
            if member.old_logprobs is not None:
                part.copy_(member.old_logprobs)
        dist.all_reduce(flat)
        for member, part in zip(everything, flat.split(counts), strict=True):
            member.old_logprobs = part

    def _update(
        self,
        plan: tuple[list[_Trained], list[MicroBatch]],
        objective: Objective,
        token_count: int,
        behavior: _BehaviorSums | None,
        report: Callable[[int, int], None],
    ) -> learner_pb2.UpdateMetrics:
        members, micro_batches = plan
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)  # loss, entropy, clipped, ratio
        ratio_max = torch.zeros(1, dtype=torch.float64, device=self._device)
        not_finite: set[str] = set()
        report(0, len(micro_batches))
        for done, micro_batch in enumerate(micro_batches, start=1):
            packed, mine = self._packed(members, micro_batch)
            logprobs, entropies = self._engine(packed, objective.temperature)
            frozen = logprobs.detach()
            parts = frozen.split(packed.counts) if mine else ()
            old = [part if m.old_logprobs is None else m.old_logprobs for m, part in zip(mine, parts, strict=True)]
            mask = torch.full_like(frozen, fill_value=bool(mine), dtype=torch.bool)
            terms = objective.terms(
                logprobs,
                torch.cat(old) if mine else frozen,
                TokenFields(torch.cat([m.advantages for m in mine]).to(self._device) if mine else frozen, mask),
            )
            # ZeRO averages over the ranks what we want summed.
            self._engine.backward(terms.loss.sum() * (self._ranks / token_count))
            if mine:
                counted = (terms.loss.detach(), entropies, terms.clipped, terms.ratio)
                sums += torch.stack([value.double().sum() for value in counted])
                ratio_max = torch.maximum(ratio_max, terms.ratio.double().max())
            losses = terms.loss.detach().split(packed.counts) if mine else ()
            for member, part, loss in zip(mine, parts, losses, strict=True):
                if not bool(torch.isfinite(part).all() & torch.isfinite(loss).all()):
                    not_finite.add(member.trajectory_id)
                if behavior is not None:
                    behavior.add(member, part)
            report(done, len(micro_batches))
        dist.all_reduce(sums)
        dist.all_reduce(ratio_max, op=dist.ReduceOp.MAX)
        rate = learning_rate(self._options, self._updates_done)
        skipped, norm = self._optimizer_step(rate)
        self._note_skip(skipped, members, not_finite)
        loss, entropy, clipped, ratio = (value / token_count for value in sums.tolist())
        return learner_pb2.UpdateMetrics(
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            entropy=entropy,
            clip_fraction=clipped,
            ratio_mean=ratio,
            ratio_max=ratio_max.item(),
            tokens=token_count,
            skipped=skipped,
        )

    def _packed(self, members: list[_Trained], micro_batch: MicroBatch) -> tuple[Packed, list[_Trained]]:
        packed = pack(micro_batch, [member.row for member in members], self._device)
        return packed, [members[index] for index in packed.rows]

    def _optimizer_step(self, rate: float) -> tuple[bool, float]:
        """Clips and steps, or leaves weights and optimizer state as they are where the norm is not finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        self._updates_done += 1
        norm = float(self._engine.get_global_grad_norm())
        return not self._engine.was_step_applied(), norm if norm >= 0 else math.nan

    def _note_skip(self, skipped: bool, members: list[_Trained], not_finite: set[str]) -> None:
        if not skipped:
            self._skipped_ids.clear()
            return
        flags = [int(member.trajectory_id in not_finite) for member in members]
        found = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        guilty = [m.trajectory_id for m, flag in zip(members, found.tolist(), strict=True) if flag]
        self._skipped_ids.append(guilty or [member.trajectory_id for member in members])

    def _give_up(self, step_id: int, result: learner_pb2.StepResult) -> None:
        ids = sorted({i for skipped in self._skipped_ids for i in skipped})
        shown = ", ".join(ids[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
        text = f"step {step_id}: {SKIPS_IN_A_ROW} Updates in a row had no finite gradient; trajectories {shown}"
        if any(not metrics.skipped for metrics in result.updates):
            raise RuntimeError(f"{text}; the step was applied in part, its weights are no policy")
        raise InvalidRequest(f"{text}; the policy is still version {step_id - 1}")


class _BehaviorSums:
    """How far the policy at the start of the Step is from the one that sampled, summed over this rank's tokens."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0, 0.0]  # tokens, |d|, exp(d), k3; d = log π_old − log μ

    def add(self, member: _Trained, old_logprobs: torch.Tensor) -> None:
        if member.behavior_logprobs is None:
            return
        d = old_logprobs.double().cpu() - member.behavior_logprobs.double()
        d = d.clamp(-LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)
        values = (float(d.numel()), d.abs().sum().item(), d.exp().sum().item(), (d.exp() - 1.0 - d).sum().item())
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]

    def fill(self, result: learner_pb2.StepResult, device: torch.device) -> None:
        """Sums over the ranks and divides once; all 0 where no behaviour log-prob was sent."""
        sums = torch.tensor(self._sums, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        tokens, difference, ratio, k3 = sums.tolist()
        if tokens:
            result.behavior_difference = difference / tokens
            result.behavior_ratio = ratio / tokens
            result.mismatch_kl_k3 = k3 / tokens


def _trained(trajectory: learner_pb2.TrainTrajectory) -> _Trained:
    positions = [position for position, flag in enumerate(trajectory.loss_mask) if flag]
    behavior = trajectory.behavior_logprobs
    return _Trained(
        row=Row(list(trajectory.token_ids), positions),
        trajectory_id=trajectory.trajectory_id,
        advantages=torch.tensor([trajectory.advantages[p] for p in positions], dtype=torch.float32),
        behavior_logprobs=torch.tensor([behavior[p] for p in positions], dtype=torch.float32) if behavior else None,
    )
