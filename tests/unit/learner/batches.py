"""Batches and headers for tests of the learner. No torch."""

from __future__ import annotations

import random

from antiphon.learner.v1 import learner_pb2

from services.common.digest import digest_messages

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def make_batch(
    vocabulary: int, *, seed: int = 0, prompts: int = 3, siblings: int = 3
) -> list[learner_pb2.TrainTrajectory]:
    """Groups with shared prompts, ragged answers, one gap of tool text in a mask, NaN wherever it is masked."""
    dice = random.Random(seed)
    batch: list[learner_pb2.TrainTrajectory] = []
    for prompt in range(prompts):
        begin = [dice.randrange(vocabulary) for _ in range(dice.randint(5, 9))]
        for sample in range(siblings if prompt else 1):
            answer = [dice.randrange(vocabulary) for _ in range(dice.randint(2, 9))]
            mask = [False] * len(begin) + [True] * len(answer)
            if sample == 1:
                mask[len(begin) + 1] = False
            batch.append(
                learner_pb2.TrainTrajectory(
                    trajectory_id=f"train/0/{prompt}/{sample}",
                    token_ids=begin + answer,
                    loss_mask=mask,
                    advantages=[dice.gauss(0, 1) if trained else float("nan") for trained in mask],
                    behavior_logprobs=[dice.gauss(-4, 0.5) if trained else 0.0 for trained in mask] if sample else [],
                )
            )
    return batch


def make_header(
    step_id: int,
    batch: list[learner_pb2.TrainTrajectory],
    plan: list[list[int]] | None = None,
    temperature: float = 0.7,
) -> learner_pb2.StepHeader:
    """A header whose Updates train on the rows of `plan`, by number; one Update of all rows without it."""
    header = learner_pb2.StepHeader(step_id=step_id, batch_digest=digest_messages(batch), trajectory_count=len(batch))
    header.policy.loss = learner_pb2.POLICY_LOSS_PPO
    header.policy.aggregation = learner_pb2.AGGREGATION_TOKEN
    header.policy.clip_low, header.policy.clip_high = CLIP_LOW, CLIP_HIGH
    header.policy.temperature = temperature
    for rows in plan or [list(range(len(batch)))]:
        header.updates.add(
            trajectory_ids=[batch[i].trajectory_id for i in rows],
            token_count=sum(sum(batch[i].loss_mask) for i in rows),
        )
    return header
