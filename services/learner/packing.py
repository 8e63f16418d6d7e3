"""The tensors of one micro-batch: made by numpy on the host, brought to the device by a copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.learner.batching import Integers, Layout, MicroBatch, Row


@dataclass(frozen=True)
class Packed:
    """B lines of L tokens, and the T predicted tokens among them, by line, row and position."""

    token_ids: torch.Tensor
    """[B, L] int64; padded at the right with 0, which nothing attends to."""
    position_ids: torch.Tensor | None
    """[B, L] int64; None: 0 … L−1 in every line."""
    attends: torch.Tensor | None
    """[B, 1, L, L] bool, true where query attends to key; None: causal, inside the row where `boundaries` say so."""
    sources: torch.Tensor
    """[T] int64: index into the flattened B × L of the token whose hidden state predicts."""
    targets: torch.Tensor
    """[T] int64: the predicted token id."""
    numbers: torch.Tensor
    """[T] int64: which predicted token of all rows it is (see `pack`)."""
    rows: tuple[int, ...]
    """Row of each run of predicted tokens, in order. None for an empty micro-batch, whose one token has no row."""
    counts: tuple[int, ...]
    """Length of each run; they sum to T."""
    boundaries: torch.Tensor | None = None
    """[R + 1] int32: where each of the R rows of the one line begins, and where the last ends; None: lines are rows."""
    longest: int = 0
    """Tokens of the longest row between two boundaries."""

    @property
    def is_empty(self) -> bool:
        return not self.rows


def pack(
    micro_batch: MicroBatch,
    rows: Sequence[Row],
    layout: Layout,
    device: torch.device,
    offsets: Sequence[int] | None = None,
) -> Packed:
    """Lays out a micro-batch. An empty one gets a line of two tokens: its rank takes part in the collectives.

    `offsets[i]` is the number that the caller gives to the first predicted token of row i, whose others follow it;
    without it the predicted tokens are numbered row after row.
    """
    if offsets is None:
        offsets = np.cumsum([0, *(len(row.predicted) for row in rows)]).tolist()
    if not micro_batch:
        zero = np.zeros(1, dtype=np.int64)
        parts = {"tokens": np.zeros(2, dtype=np.int64), "sources": zero, "targets": zero, "numbers": zero}
        if layout is Layout.ONE_LINE:
            parts |= {"positions": np.arange(2), "boundaries": np.array([0, 2])}
        return _packed(parts, (), (), width=2, device=device, longest=2)
    if layout is Layout.ONE_LINE:
        return _one_line([line.rows[0] for line in micro_batch], rows, offsets, device)
    return _side_by_side(micro_batch, rows, offsets, device)


def _one_line(members: Sequence[int], rows: Sequence[Row], offsets: Sequence[int], device: torch.device) -> Packed:
    lengths = np.array([len(rows[i].token_ids) for i in members])
    boundaries = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.concatenate([np.asarray(rows[i].token_ids, dtype=np.int64) for i in members])
    predicted = [np.asarray(rows[i].predicted, dtype=np.int64) for i in members]
    places = np.concatenate([begin + part for begin, part in zip(boundaries[:-1], predicted, strict=True)])
    parts = {
        "tokens": tokens,
        "positions": np.arange(len(tokens)) - np.repeat(boundaries[:-1], lengths),
        "sources": places - 1,
        "targets": tokens[places],
        "numbers": np.concatenate([offsets[i] + np.arange(len(p)) for i, p in zip(members, predicted, strict=True)]),
        "boundaries": boundaries,
    }
    counts = tuple(len(part) for part in predicted)
    return _packed(parts, tuple(members), counts, width=len(tokens), device=device, longest=int(lengths.max()))


def _side_by_side(micro_batch: MicroBatch, rows: Sequence[Row], offsets: Sequence[int], device: torch.device) -> Packed:
    width = max(line.length for line in micro_batch)
    shared = any(len(line.rows) > 1 for line in micro_batch)
    tokens = np.zeros((len(micro_batch), width), dtype=np.int64)
    positions = np.tile(np.arange(width), (len(micro_batch), 1))
    attends = np.tile(np.tri(width, dtype=bool), (len(micro_batch), 1, 1)) if shared else None
    sources: list[Integers] = []
    targets: list[Integers] = []
    numbers: list[Integers] = []
    members: list[int] = []
    for number, line in enumerate(micro_batch):
        begin = line.context
        tokens[number, :begin] = rows[line.rows[0]].token_ids[: line.context]
        for index in line.rows:
            ids = np.asarray(rows[index].token_ids, dtype=np.int64)
            end = begin + len(ids) - line.context
            tokens[number, begin:end] = ids[line.context :]
            positions[number, begin:end] = np.arange(line.context, len(ids))
            if attends is not None:
                attends[number, begin:end, line.context : begin] = False  # what the siblings before it said
            predicted = np.asarray(rows[index].predicted, dtype=np.int64)
            before = predicted - 1
            sources.append(number * width + np.where(before < line.context, before, before + begin - line.context))
            targets.append(ids[predicted])
            numbers.append(offsets[index] + np.arange(len(predicted)))
            members.append(index)
            begin = end
    parts = {
        "tokens": tokens.reshape(-1),
        "sources": np.concatenate(sources),
        "targets": np.concatenate(targets),
        "numbers": np.concatenate(numbers),
    }
    if shared:
        parts["positions"] = positions.reshape(-1)
    counts = tuple(len(part) for part in targets)
    mask = None if attends is None else on_device(torch.from_numpy(attends).unsqueeze(1), device)
    return _packed(parts, tuple(members), counts, width=width, device=device, attends=mask)


def _packed(
    parts: dict[str, Any],
    rows: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    width: int,
    device: torch.device,
    attends: torch.Tensor | None = None,
    longest: int = 0,
) -> Packed:
    together = on_device(torch.from_numpy(np.concatenate(list(parts.values()), dtype=np.int64)), device)
    found = dict(zip(parts, together.split([len(part) for part in parts.values()]), strict=True))
    positions, boundaries = found.get("positions"), found.get("boundaries")
    return Packed(
        token_ids=found["tokens"].view(-1, width),
        position_ids=None if positions is None else positions.view(-1, width),
        attends=attends,
        sources=found["sources"],
        targets=found["targets"],
        numbers=found["numbers"],
        rows=rows,
        counts=counts,
        boundaries=None if boundaries is None else boundaries.to(torch.int32),
        longest=longest,
    )


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy there; to a GPU through pinned memory, so that the host does not wait for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
