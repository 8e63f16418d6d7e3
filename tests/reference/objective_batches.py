"""Objectives on whole Batches: their loss and gradient by hand, carried through a plain model in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch
from antiphon.learner.v1 import learner_pb2

from tests.reference import objectives_numpy as plain
from tests.unit.learner.plain_policy import token_logprobs

LENGTH = 9
COEFFICIENT = 0.3
ENTROPY = 0.05


def _ppo() -> learner_pb2.PolicyObjective:
    return learner_pb2.PolicyObjective(
        loss=learner_pb2.POLICY_LOSS_PPO,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        aggregation=learner_pb2.AGGREGATION_CONSTANT,
        constant_length=LENGTH,
        correction=learner_pb2.Correction(kind=learner_pb2.CORRECTION_KIND_SEQ_MASK, low=0.8, high=1.25),
        kl=learner_pb2.KlLoss(estimator=learner_pb2.KL_ESTIMATOR_K2, coefficient=COEFFICIENT, ratio_cap=1.1),
    )


def _gspo() -> learner_pb2.PolicyObjective:
    return learner_pb2.PolicyObjective(
        loss=learner_pb2.POLICY_LOSS_GSPO,
        clip_low=0.1,
        clip_high=0.15,
        aggregation=learner_pb2.AGGREGATION_SEQUENCE,
        kl=learner_pb2.KlLoss(estimator=learner_pb2.KL_ESTIMATOR_K3, coefficient=COEFFICIENT),
    )


def _cispo() -> learner_pb2.PolicyObjective:
    return learner_pb2.PolicyObjective(
        loss=learner_pb2.POLICY_LOSS_CISPO,
        clip_high=0.28,
        aggregation=learner_pb2.AGGREGATION_TOKEN,
        correction=learner_pb2.Correction(kind=learner_pb2.CORRECTION_KIND_TIS, high=1.2),
        entropy_coefficient=ENTROPY,
    )


OBJECTIVES: dict[str, Callable[[], learner_pb2.PolicyObjective]] = {"ppo": _ppo, "gspo": _gspo, "cispo": _cispo}


def complete(batch: list[learner_pb2.TrainTrajectory], seed: int) -> list[learner_pb2.TrainTrajectory]:
    """The rows with one advantage each, and log-probs of the policy that sampled and of a reference."""
    dice = random.Random(seed)
    for row in batch:
        advantage = dice.gauss(0, 1)
        row.advantages[:] = [advantage if trained else float("nan") for trained in row.loss_mask]
        for field in (row.behavior_logprobs, row.reference_logprobs):
            field[:] = [dice.gauss(-5.0, 0.5) if trained else float("nan") for trained in row.loss_mask]
    return batch


def expected(
    name: str, model: torch.nn.Module, batch: list[learner_pb2.TrainTrajectory], temperature: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one Update on all rows, the policy being that of the start of the Step."""
    model = copy.deepcopy(model).double()
    logprobs = [token_logprobs(model, list(row.token_ids), temperature) for row in batch]
    rows = []
    for row, each in zip(batch, logprobs, strict=True):
        now = each.detach().numpy()
        behavior, reference, advantages = (
            np.array(v) for v in (row.behavior_logprobs, row.reference_logprobs, row.advantages)
        )
        rows.append(plain.Sequence(now, now, behavior, reference, advantages, np.array(row.loss_mask)))
    values, slopes = zip(*(_tokens(name, row) for row in rows), strict=True)
    how = {"ppo": "constant", "gspo": "sequence", "cispo": "token"}[name]
    count = sum(len(row.trained) for row in rows)
    loss = plain.aggregate(values, rows, how, LENGTH)
    carrier = torch.zeros((), dtype=torch.float64)
    for row, each, slope in zip(rows, logprobs, slopes, strict=True):
        share = {"ppo": 1 / (len(rows) * LENGTH), "gspo": 1 / (len(rows) * len(row.trained)), "cispo": 1 / count}[name]
        for t in row.trained:
            carrier = carrier + share * slope[t] * each[t]
    if name == "cispo":
        entropy = sum(_entropies(model, row, temperature) for row in batch) / count
        carrier = carrier - ENTROPY * entropy
        loss -= ENTROPY * entropy.item()
    carrier.backward()
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _tokens(name: str, row: plain.Sequence) -> tuple[dict[int, float], dict[int, float]]:
    if name == "ppo":
        each, kl = plain.ppo(row, low=0.2, high=0.28, dual=3.0), plain.kl(row, "k2", 1.1)
        weights = plain.correction(row, "seq_mask", 0.8, 1.25)
    elif name == "gspo":
        each, kl = plain.gspo(row, low=0.1, high=0.15), plain.kl(row, "k3")
        weights = dict.fromkeys(each, 1.0)
    else:
        each, kl = plain.cispo(row, high=0.28), dict.fromkeys(row.trained, (0.0, 0.0, 0.0))
        weights = plain.correction(row, "tis", high=1.2)
    values = {t: each[t][0] * weights[t] + COEFFICIENT * kl[t][1] for t in each}
    return values, {t: each[t][1] * weights[t] + COEFFICIENT * kl[t][2] for t in each}


def _entropies(model: torch.nn.Module, row: learner_pb2.TrainTrajectory, temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([list(row.token_ids)]), use_cache=False).logits[0, :-1] / temperature
    normal = torch.log_softmax(logits, -1)
    each = -(normal.exp() * normal).sum(-1)
    total: torch.Tensor = sum(each[i - 1] for i, trained in enumerate(row.loss_mask) if trained)
    return total
