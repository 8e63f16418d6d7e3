"""How the rows of an Update become micro-batches, equal in number on every rank. Pure, deterministic, no torch.

Rows are first laid out in *lines*. A line is one row, or several that begin alike, which share their beginning:

    row 0   c c c a a a          line   c c c a a a b b      (a attends to c and a; b to c and b)
    row 1   c c c b b

The siblings of a group share their prompt, so its tokens are computed once a line instead of once a row; the log-probs
and their gradient are the same. It is done where it saves enough (SHARING_SAVES).

Lines then go to ranks (longest first, to the rank with the least work) and, on each rank, into micro-batches of at most
`token_budget` tokens, padding counted. A rank that has fewer micro-batches than another gets empty ones: every rank
must take part in every collective of ZeRO-3.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

SHARING_SAVES = 0.25
"""Share of a family's tokens that sharing must save: attention under a mask costs more, and answers longer than their
prompt gain little."""


class Layout(enum.Enum):
    """How the lines of a micro-batch lie in its tensors."""

    PADDED = "padded"
    """Side by side, each padded to the longest; one row a line."""
    SHARED = "shared"
    """The same, and rows that begin alike share a line, under a mask."""
    ONE_LINE = "one line"
    """One after the other, nothing between them; attention is told where each row begins."""


@dataclass(frozen=True)
class Row:
    """One sequence, and where its log-probs are wanted."""

    token_ids: Sequence[int] | Integers
    predicted: Sequence[int] | Integers
    """Positions, rising, each at least 1: the log-prob of the token there, given all before it, is wanted."""

    @property
    def context_length(self) -> int:
        """Tokens before the first one whose log-prob is wanted."""
        return int(self.predicted[0])


@dataclass(frozen=True)
class Line:
    """Rows that share their first `context` tokens; one row alone shares nothing."""

    rows: tuple[int, ...]
    context: int
    length: int
    """Tokens laid out: the context once, and what each row has after it."""


MicroBatch = tuple[Line, ...]
"""Lines that go through the model together, the longest first. Without lines: an empty one."""


def plan_micro_batches(rows: Sequence[Row], *, ranks: int, token_budget: int, layout: Layout) -> list[list[MicroBatch]]:
    """The micro-batches of each rank: result[rank][k], with as many k for every rank, at least one.

    Every row with a predicted token is in exactly one of them; rows without one are left out, they add nothing. A line
    longer than the budget is a micro-batch of its own. The same arguments give the same plan in every process.
    """
    share = layout is Layout.SHARED
    lines = _lines(rows, token_budget if share else 0)
    while share and 0 < len(lines) < ranks and any(len(line.rows) > 1 for line in lines):
        lines = _one_more_line(rows, lines)
    fill = _filled_one_line if layout is Layout.ONE_LINE else _filled_padded
    plans = [fill(part, token_budget) for part in _spread(lines, ranks)]
    most = max(1, *(len(plan) for plan in plans))
    return [plan + [()] * (most - len(plan)) for plan in plans]


def _line(rows: Sequence[Row], members: Sequence[int]) -> Line:
    context = rows[members[0]].context_length if len(members) > 1 else 0
    return Line(tuple(members), context, context + sum(len(rows[i].token_ids) - context for i in members))


def _lines(rows: Sequence[Row], longest_shared: int) -> list[Line]:
    """Rows with equal contexts together, in lines of at most `longest_shared` tokens; 0 shares nothing."""
    families: dict[tuple[int, ...] | int, list[int]] = {}
    for index, row in enumerate(rows):
        if len(row.predicted):
            key = tuple(row.token_ids[: row.context_length]) if longest_shared else index
            families.setdefault(key, []).append(index)
    lines: list[Line] = []
    for family in families.values():
        saved = (len(family) - 1) * rows[family[0]].context_length
        if not longest_shared or saved < SHARING_SAVES * sum(len(rows[i].token_ids) for i in family):
            lines += [_line(rows, [index]) for index in family]
            continue
        members: list[int] = []
        for index in sorted(family, key=lambda i: (-len(rows[i].token_ids), i)):
            if members and _line(rows, [*members, index]).length > longest_shared:
                lines.append(_line(rows, members))
                members = []
            members.append(index)
        lines.append(_line(rows, members))
    return lines


def _one_more_line(rows: Sequence[Row], lines: list[Line]) -> list[Line]:
    """The longest shared line cut in two, so that no rank is idle while another has all rows of a group."""
    longest = max((line for line in lines if len(line.rows) > 1), key=lambda line: (line.length, line.rows))
    halves = [_line(rows, longest.rows[0::2]), _line(rows, longest.rows[1::2])]
    return [line for line in lines if line != longest] + halves


def _spread(lines: Sequence[Line], ranks: int) -> list[list[Line]]:
    parts: list[list[Line]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for line in sorted(lines, key=lambda line: (-line.length, line.rows)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        parts[rank].append(line)
        load[rank] += line.length
    return parts


def _filled_padded(lines: Sequence[Line], token_budget: int) -> list[MicroBatch]:
    """Lines, longest first, in micro-batches of at most `token_budget` tokens, padding counted."""
    result: list[list[Line]] = []
    for line in lines:
        # Sorted, so the first line of a micro-batch is its width.
        if not result or (len(result[-1]) + 1) * result[-1][0].length > token_budget:
            result.append([])
        result[-1].append(line)
    return [tuple(micro_batch) for micro_batch in result]


def _filled_one_line(lines: Sequence[Line], token_budget: int) -> list[MicroBatch]:
    """Each line, longest first, into the fullest micro-batch that has room for it."""
    result: list[list[Line]] = []
    room: list[int] = []
    for line in lines:
        fitting = [number for number, left in enumerate(room) if left >= line.length]
        if fitting:
            number = min(fitting, key=lambda k: (room[k], k))
        else:
            number = len(result)
            result.append([])
            room.append(token_budget)
        result[number].append(line)
        room[number] -= line.length
    return [tuple(micro_batch) for micro_batch in result]
