"""Log-probabilities of what was sampled under the frozen reference model, from the reward workers that have it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from services.common.client import retried
from services.common.errors import ConfigError, Conflict, Unavailable
from services.coordinator.clients import RewardClient
from services.coordinator.groups import Group
from services.coordinator.identity import TrajectoryKey
from services.coordinator.trajectories import key_of
from services.coordinator.waits import few_tries, together
from services.coordinator.workers import Workers, least_loaded

ROWS_PER_CALL = 64
"""A worker that dies costs so many rows, which are asked for again elsewhere."""
CALLS_AT_ONCE = 16
"""A worker takes 64 (services/reward/service.py)."""


class Reference:
    """One model for the whole run: its weights are pinned by digest at the start."""

    def __init__(self, workers: Workers, vocabulary_digest: bytes, *, temperature: float) -> None:
        """`vocabulary_digest` is that of the vocabulary which the token ids are of."""
        self._workers = workers
        self._vocabulary_digest = vocabulary_digest
        self._temperature = temperature
        self._digest: int | None = None
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)

    async def check(self) -> str:
        """The path of the model. Raises ConfigError where a worker has none, or they have different ones."""
        found = {worker.worker_id: await worker.reference_info() for worker in self._workers.rewards()}
        without = sorted(name for name, info in found.items() if info is None)
        if without:
            raise ConfigError(f"algorithm.kl: {', '.join(without)} has no reference model; set reward.reference")
        if not found:
            raise Unavailable("algorithm.kl: no reward worker is alive, and the reference model is there")
        infos = {name: info for name, info in found.items() if info is not None}
        if len({info.digest for info in infos.values()}) != 1:
            held = ", ".join(f"{name} {info.path} {info.digest:016x}" for name, info in sorted(infos.items()))
            raise ConfigError(f"algorithm.kl: the reward workers have different reference models: {held}")
        info = next(iter(infos.values()))
        if info.tokenizer_digest != self._vocabulary_digest:
            raise ConfigError(
                f"algorithm.kl: the reference model {info.path} has another vocabulary than the policy: its log-probs "
                "of the policy's tokens would mean nothing; take a reference of the same family"
            )
        self._digest = info.digest
        return info.path

    async def logprobs(
        self, groups: Sequence[Group], deadline_seconds: float
    ) -> Mapping[TrajectoryKey, Sequence[float]]:
        """Of every token of every trajectory, under the temperature of the sampling; 0 for the first token of each."""
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        parts: list[dict[str, Sequence[int]]] = [
            {str(key_of(row)): row.token_ids for row in rows[begin : begin + ROWS_PER_CALL]}
            for begin in range(0, len(rows), ROWS_PER_CALL)
        ]
        found: dict[str, list[float]] = {}
        for answers in await together([self._part(part, deadline_seconds) for part in parts]):
            found |= answers
        for row in rows:
            logprobs = found[str(key_of(row))]
            if len(logprobs) != len(row.token_ids) or not all(map(math.isfinite, logprobs)):
                finite = sum(map(math.isfinite, logprobs))
                raise Conflict(
                    f"{key_of(row)}: {len(row.token_ids)} tokens, {len(logprobs)} reference log-probs, {finite} finite"
                )
        return {key_of(row): found[str(key_of(row))] for row in rows}

    async def _part(self, sequences: dict[str, Sequence[int]], deadline_seconds: float) -> dict[str, list[float]]:
        avoid: set[str] = set()

        async def attempt() -> dict[str, list[float]]:
            worker = least_loaded(self._workers.rewards(), avoid)
            avoid.add(worker.worker_id)
            worker.in_flight += 1
            try:
                await self._require_same_model(worker)
                return await worker.reference_logprobs(
                    sequences, self._temperature, deadline_seconds, self._vocabulary_digest
                )
            finally:
                worker.in_flight -= 1

        seconds = self._workers.replacement_seconds  # a worker that died comes back, and loads the model first
        async with self._slots:
            return await (retried(attempt, deadline_seconds=seconds) if seconds else few_tries(attempt))

    async def _require_same_model(self, worker: RewardClient) -> None:
        """It may be another life of the worker, and its folder hold something else by now."""
        info = await worker.reference_info()
        if info is None:
            raise Unavailable(f"{worker.worker_id}: its reference model is loading")
        if info.digest != self._digest:
            raise Conflict(
                f"{worker.worker_id}: {info.path} has the digest {info.digest:016x}, the run began with a reference of "
                f"{self._digest or 0:016x}; put those weights back"
            )
