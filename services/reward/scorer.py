"""What a scorer is, and the set of scorers of a worker. An outcome is a score or a failure, which is never a number."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from antiphon.reward.v1 import reward_pb2

from services.common.errors import InvalidRequest, NotFound

Outcome = reward_pb2.Score | reward_pb2.ScoreFailure

INFRA = reward_pb2.FAILURE_KIND_INFRA
DATA = reward_pb2.FAILURE_KIND_DATA


class Scorer(Protocol):
    """Scores candidates under one name and version."""

    name: str
    version: str
    whole_groups: bool
    signature: str
    concurrency: int
    """Calls that it works on at the same time: of a candidate, or of a group with `whole_groups`."""

    async def start(self) -> None:
        """Gets ready to score. Raises ConfigError when it never can."""

    async def score(self, candidates: Sequence[reward_pb2.Candidate]) -> list[Outcome]:
        """One outcome per candidate, in their order. With `whole_groups` they are all answers to one prompt."""

    def problem(self) -> str | None:
        """None while it can score, else what is wrong."""

    async def close(self) -> None:
        """Ends its children."""


def failed(kind: reward_pb2.FailureKind, reason: str, message: str) -> reward_pb2.ScoreFailure:
    """A failure; the message is made valid Unicode, as protobuf wants it."""
    return reward_pb2.ScoreFailure(kind=kind, reason=reason, message=message.encode("utf-8", "replace").decode())


def full_name(scorer: Scorer) -> str:
    return f"{scorer.name}@{scorer.version}"


class ScorerSet:
    """The scorers of this worker, found by "name" or "name@version"."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = list(scorers)

    def __iter__(self) -> Iterator[Scorer]:
        return iter(self._scorers)

    def find(self, wanted: str) -> Scorer:
        """Raises NotFound, or InvalidRequest when a bare name has several versions."""
        name, separator, version = wanted.partition("@")
        found = [s for s in self._scorers if s.name == name and (not separator or s.version == version)]
        if not found:
            known = ", ".join(full_name(s) for s in self._scorers)
            raise NotFound(f"no scorer {wanted!r} here; this worker has {known}")
        if len(found) > 1:
            names = ", ".join(full_name(s) for s in found)
            raise InvalidRequest(f"scorer {wanted!r} has several versions here; ask for one of {names}")
        return found[0]

    def problem(self) -> str | None:
        """The first scorer's problem, None when all can score."""
        return next((f"{full_name(s)}: {p}" for s in self._scorers if (p := s.problem()) is not None), None)

    async def start(self) -> None:
        """Starts all at once. Raises ConfigError when a scorer never can score."""
        try:
            async with asyncio.TaskGroup() as group:
                for scorer in self._scorers:
                    group.create_task(scorer.start())
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        for scorer in self._scorers:
            await scorer.close()
