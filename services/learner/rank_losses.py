"""Signs that ranks were lost, and which of them is the cause: the others only echo it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from antiphon.learner.v1 import ranks_pb2

from services.common.processes import how_it_ended

TRACEBACK_CHARACTERS = 1000
"""Of the end of a rank's traceback, in the error: a gRPC status has room for little more. All of it is in the log."""


class Sign(enum.IntEnum):
    """Signs of a loss, the likelier cause first: whoever dies without a word is not complaining of another."""

    DIED_SILENTLY = 0
    FAILED = 1
    CLOSED = 2
    DIED_AFTER_FAILING = 3


@dataclass
class Loss:
    """One sign."""

    sign: Sign
    rank: int
    text: str


class Losses:
    """The signs that came, in their order."""

    def __init__(self) -> None:
        self._seen: list[Loss] = []

    def note(self, loss: Loss) -> bool:
        """Whether it is the first."""
        self._seen.append(loss)
        return len(self._seen) == 1

    @property
    def only_closed(self) -> bool:
        """Connections closed and nobody has said or shown why, so far."""
        return all(loss.sign is Sign.CLOSED for loss in self._seen)

    @property
    def cause(self) -> str:
        """The first of the likeliest kind."""
        return min(self._seen, key=lambda loss: loss.sign).text

    def of_death(self, rank: int, pid: int, code: int, log: Path) -> Loss:
        """What it means that the process of a rank has ended."""
        failed = any(loss.rank == rank and loss.sign is Sign.FAILED for loss in self._seen)
        sign = Sign.DIED_AFTER_FAILING if failed else Sign.DIED_SILENTLY
        return Loss(sign, rank, f"rank {rank} (pid {pid}) {how_it_ended(code)}; log: {log}")


def of_failure(rank: int, failure: ranks_pb2.RankFailure, log: Path) -> Loss:
    """A rank says that it cannot go on."""
    trace = failure.traceback[-TRACEBACK_CHARACTERS:]
    return Loss(Sign.FAILED, rank, f"rank {rank} failed: {failure.message}; log: {log}\n{trace}")


def of_closing(rank: int, log: Path) -> Loss:
    """A rank's connection is gone."""
    return Loss(Sign.CLOSED, rank, f"rank {rank} closed its connection; log: {log}")
