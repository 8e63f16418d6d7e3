"""Which micro-batches a dry run computes: one for each Update, the largest, by hand."""

from __future__ import annotations

import pytest
import torch
from antiphon.learner.v1 import learner_pb2

from services.learner.batching import Layout
from services.learner.config import OptimizerConfig
from services.learner.dry_stepping import DryStepRunner
from services.learner.step_tokens import StepTokens
from services.learner.stepping import StepRunner

CPU = torch.device("cpu")


def tokens_of(lengths: list[int]) -> StepTokens:
    """Rows of so many tokens, the first of each is its prompt."""
    rows = [
        learner_pb2.TrainTrajectory(
            trajectory_id=f"row-{number}",
            token_ids=range(length),
            loss_mask=[False] + [True] * (length - 1),
            advantages=[0.0] * length,
        )
        for number, length in enumerate(lengths)
    ]
    return StepTokens(rows, CPU)


def lengths_computed(
    kind: type[StepRunner], lengths: list[int], *, budget: int, layout: Layout, rank: int = 0, ranks: int = 1
) -> list[list[int]]:
    """Tokens of each row, micro-batch by micro-batch, of an Update on all rows."""
    options = OptimizerConfig.model_validate({"learning_rate": 1e-3})
    runner = kind(None, options, rank=rank, ranks=ranks, device=CPU, token_budget=budget, layout=layout)
    tokens = tokens_of(lengths)
    members, micro_batches = runner._planned(tokens, tokens.ids)
    assert members == list(range(len(lengths)))
    return [[lengths[row] for line in lines for row in line.rows] for lines in micro_batches]


# Side by side, 12 and 2 take 2 · 12 = 24 and eleven rows of 2 take 22, although they have more tokens; in one line the
# first micro-batch takes 12 and six rows of 2, the second the other six.
@pytest.mark.parametrize(
    ("layout", "whole", "largest"),
    [
        (Layout.PADDED, [[12, 2], [2] * 11], [12, 2]),
        (Layout.ONE_LINE, [[12, *[2] * 6], [2] * 6], [12, *[2] * 6]),
    ],
)
def test_one_micro_batch_of_an_update_the_largest(layout, whole, largest):
    lengths = [2] * 12
    lengths.insert(5, 12)
    assert lengths_computed(StepRunner, lengths, budget=24, layout=layout) == whole
    assert lengths_computed(DryStepRunner, lengths, budget=24, layout=layout) == [largest]


def test_a_rank_without_rows_computes_an_empty_one():
    """Every rank takes part in what ZeRO-3 gathers."""
    for rank, expected in ((0, [[7]]), (1, [[]])):
        assert lengths_computed(DryStepRunner, [7], budget=8, layout=Layout.PADDED, rank=rank, ranks=2) == expected
