"""How the requests of the embedded engine are decoded: each alone, one after the other, or all in one batch.

A step is one forward: of a prompt, or of one more token. Alone, a request's forwards are the same whatever else is
asked for, and so are their bits. In a batch they are faster by far, and the last bits depend on who else is in it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.cache_utils import Cache

from services.rollout.engine import Sample, SampleRequest, Span
from services.rollout.sampling import draw
from services.rollout.stop_strings import StopStrings
from services.rollout.transformers_cache import RowCache
from services.rollout.transformers_model import Model

logger = logging.getLogger(__name__)


class RunningRequest:
    """A request and what was sampled for it so far. Every request has a generator of its own, from its seed."""

    def __init__(self, request: SampleRequest, stop_strings: StopStrings | None) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._stop_strings = stop_strings
        self._generator = torch.Generator().manual_seed(request.seed)

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    def take(self, logits: torch.Tensor, version: int) -> Sample | None:
        """Draws the next token, and stamps it with the version of the weights that the logits come from.

        Answers the whole sample once it is finished.
        """
        token, logprob = draw(logits, self.request.temperature, self._generator)
        at = len(self.token_ids)
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        if self._spans and self._spans[-1].policy_version == version:
            self._spans[-1] = Span(self._spans[-1].start, at + 1, version)
        else:
            self._spans.append(Span(at, at + 1, version))
        stop_string = self._stop_strings.found(token) if self._stop_strings is not None else ""
        if stop_string or token in self._stop_token_ids:
            return self._sample("stop", stop_string)
        return self._sample("length") if at + 1 == self.request.max_tokens else None

    def aborted(self) -> Sample:
        return self._sample("aborted")

    def _sample(self, reason: str, stop_string: str = "") -> Sample:
        return Sample(tuple(self.token_ids), tuple(self._logprobs), reason, tuple(self._spans), stop_string)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """A request that left: with its sample, or with what went wrong."""

    id: str
    sample: Sample | None = None
    error: Exception | None = None


class Decoding(Protocol):
    """The requests under way."""

    @property
    def busy(self) -> bool: ...

    def add(self, sequence: RunningRequest) -> None: ...

    def remove(self, request_id: str) -> RunningRequest | None:
        """Takes a request out, wherever it is; None when it is not here."""

    def step(self, version: int) -> list[Outcome]:
        """One forward; answers those that left with it."""

    def clear(self) -> None:
        """Drops all cached keys and values that no request is using."""


class Alone:
    """One request at a time, in the order in which they came."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._waiting: OrderedDict[str, RunningRequest] = OrderedDict()
        self._current: tuple[RunningRequest, Cache] | None = None

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def add(self, sequence: RunningRequest) -> None:
        self._waiting[sequence.request.id] = sequence

    def remove(self, request_id: str) -> RunningRequest | None:
        if self._current is not None and self._current[0].request.id == request_id:
            sequence, self._current = self._current[0], None
            return sequence
        return self._waiting.pop(request_id, None)

    def step(self, version: int) -> list[Outcome]:
        if self._current is None:
            _, sequence = self._waiting.popitem(last=False)
        else:
            sequence = self._current[0]
        try:
            if self._current is None:
                logits, cache = self._model.prefill(sequence.request.prompt_token_ids)
                self._current = (sequence, cache)
            else:
                logits = self._model.decode(sequence.token_ids[-1], self._current[1])
            sample = sequence.take(logits, version)
        except Exception as error:
            self._current = None
            return [Outcome(sequence.request.id, error=error)]
        if sample is None:
            return []
        self._current = None
        return [Outcome(sequence.request.id, sample)]

    def clear(self) -> None:
        pass  # a request's cache goes with it


class Continuous:
    """All that run in one batch, which requests enter and leave between two steps."""

    def __init__(self, model: Model, *, most_running: int, cache_bytes: int, shares_prefixes: bool) -> None:
        self._model = model
        self._most_running = most_running
        self._shares_prefixes = shares_prefixes
        self._waiting: OrderedDict[str, RunningRequest] = OrderedDict()
        self._rows: list[RunningRequest] = []  # in the order of the cache's rows
        self._cache = RowCache(cache_bytes)
        self._prefix: tuple[tuple[int, ...], torch.Tensor, Cache] | None = None
        """The prompt that was computed last, its logits and its keys and values: siblings come one after another."""

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, sequence: RunningRequest) -> None:
        self._waiting[sequence.request.id] = sequence

    def remove(self, request_id: str) -> RunningRequest | None:
        for row, sequence in enumerate(self._rows):
            if sequence.request.id == request_id:
                self._leave(row)
                return sequence
        return self._waiting.pop(request_id, None)

    def step(self, version: int) -> list[Outcome]:
        if self._waiting and len(self._rows) < self._most_running:
            first = next(iter(self._waiting.values()))
            if self._cache.fits(first.most_tokens):
                return self._enter(version)
        try:
            logits = self._model.decode_rows([sequence.token_ids[-1] for sequence in self._rows], self._cache)
        except Exception as error:
            ended = [Outcome(sequence.request.id, error=error) for sequence in self._rows]
            self._rows.clear()
            self._cache.clear()
            return ended
        return self._taken(logits, version)

    def clear(self) -> None:
        self._prefix = None
        if not self._rows:
            self._cache.clear()

    def _enter(self, version: int) -> list[Outcome]:
        request_id, sequence = self._waiting.popitem(last=False)
        try:
            logits, cache = self._prefilled(sequence.request.prompt_token_ids)
            sample = sequence.take(logits, version)
            if sample is None:
                self._cache.add(cache, sequence.most_tokens)
                self._rows.append(sequence)
        except Exception as error:
            return [Outcome(request_id, error=error)]
        return [] if sample is None else [Outcome(request_id, sample)]

    def _prefilled(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Cache]:
        prompt = tuple(token_ids)
        if self._prefix is not None and self._prefix[0] == prompt:
            return self._prefix[1], self._prefix[2]
        logits, cache = self._model.prefill(prompt)
        if self._shares_prefixes:
            self._prefix = (prompt, logits, cache)
        return logits, cache

    def _taken(self, logits: torch.Tensor, version: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for row in reversed(range(len(self._rows))):  # from the end: who leaves is replaced by one that was looked at
            sequence = self._rows[row]
            try:
                sample = sequence.take(logits[row], version)
            except Exception as error:
                outcomes.append(Outcome(sequence.request.id, error=error))
                self._leave(row)
                continue
            if sample is not None:
                outcomes.append(Outcome(sequence.request.id, sample))
                self._leave(row)
        return outcomes

    def _leave(self, row: int) -> None:
        self._cache.remove(row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()
