"""The tensors of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.learner.batching import MicroBatch, Row


@dataclass(frozen=True)
class Packed:
    """B lines of L tokens, and the T predicted tokens among them, by line, row and position."""

    token_ids: torch.Tensor
    """[B, L] int64; padded at the right with 0, which nothing attends to."""
    position_ids: torch.Tensor | None
    """[B, L] int64; None: 0 … L−1 in every line."""
    attends: torch.Tensor | None
    """[B, 1, L, L] bool, true where query attends to key; None: causal."""
    sources: torch.Tensor
    """[T] int64: index into the flattened B × L of the token whose hidden state predicts."""
    targets: torch.Tensor
    """[T] int64: the predicted token id."""
    rows: tuple[int, ...]
    """Row of each run of predicted tokens, in order."""
    counts: tuple[int, ...]
    """Length of each run; they sum to T. None of them for an empty micro-batch, whose one token belongs to no row."""

    @property
    def is_empty(self) -> bool:
        return not self.rows


def pack(micro_batch: MicroBatch, rows: Sequence[Row], device: torch.device) -> Packed:
    """Lays out a micro-batch. An empty one gets a line of two tokens: its rank takes part in the collectives."""
    if not micro_batch:
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
        index = torch.zeros(1, dtype=torch.int64, device=device)
        return Packed(tokens, None, None, index, index.clone(), (), ())
    width = max(line.length for line in micro_batch)
    shared = any(len(line.rows) > 1 for line in micro_batch)
    token_ids = torch.zeros((len(micro_batch), width), dtype=torch.int64)
    position_ids = torch.arange(width).repeat(len(micro_batch), 1)
    attends = torch.ones((width, width), dtype=torch.bool).tril().repeat(len(micro_batch), 1, 1) if shared else None
    sources: list[int] = []
    targets: list[int] = []
    members: list[int] = []
    counts: list[int] = []
    for number, line in enumerate(micro_batch):
        begin = line.context
        context_ids = rows[line.rows[0]].token_ids[: line.context]
        token_ids[number, :begin] = torch.tensor(context_ids, dtype=torch.int64)
        for index in line.rows:
            row = rows[index]
            own = torch.tensor(row.token_ids[line.context :], dtype=torch.int64)
            end = begin + len(own)
            token_ids[number, begin:end] = own
            position_ids[number, begin:end] = torch.arange(line.context, line.context + len(own))
            if attends is not None:
                attends[number, begin:end, line.context : begin] = False  # what the siblings before it said
            for position in row.predicted:
                before = position - 1
                place = before if before < line.context else begin + before - line.context
                sources.append(number * width + place)
                targets.append(row.token_ids[position])
            members.append(index)
            counts.append(len(row.predicted))
            begin = end
    return Packed(
        token_ids.to(device),
        position_ids.to(device) if shared else None,
        None if attends is None else attends.unsqueeze(1).to(device),
        torch.tensor(sources, dtype=torch.int64, device=device),
        torch.tensor(targets, dtype=torch.int64, device=device),
        tuple(members),
        tuple(counts),
    )
