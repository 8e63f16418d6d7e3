"""Trajectories of one prompt from an engine that serves the wanted policy; elsewhere or again when one cannot."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from antiphon.rollout.v1 import rollout_pb2

from services.common.client import new_request_id
from services.common.errors import AntiphonError, Overloaded, Unavailable
from services.coordinator import trajectories
from services.coordinator.clients import RolloutClient
from services.coordinator.data import Prompt
from services.coordinator.identity import PromptKey
from services.coordinator.trajectories import Trajectory
from services.coordinator.waits import FIRST_PAUSE_SECONDS, TRIES
from services.coordinator.workers import Workers, least_loaded

logger = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 2.0

OnTrajectory = Callable[[Trajectory], None]


class Sampler:
    """Asks engines for trajectories. At most `calls_per_worker` calls per engine are under way."""

    def __init__(self, workers: Workers, *, run_seed: int, stop_token_ids: list[int], calls_per_worker: int) -> None:
        self._workers = workers
        self._run_seed = run_seed
        self._stop_token_ids = stop_token_ids
        self._calls_per_worker = calls_per_worker
        self._freed = asyncio.Condition()

    async def sample(
        self,
        key: PromptKey,
        prompt: Prompt,
        *,
        samples: int,
        temperature: float,
        max_tokens: int,
        version: int,
        deadline_seconds: float,
        on_trajectory: OnTrajectory | None = None,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> list[Trajectory]:
        """Every trajectory of the prompt, by sample number, each checked and sampled by this policy version only.

        A retry carries the same request id. `keep` makes them durable once all are there; only then the engines that
        were asked are told that they may forget them. Raises Unavailable when a few tries, elsewhere first, did not
        help; Conflict when an engine serves another version; what `keep` raises.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=key.message(),
            prompt_token_ids=prompt.token_ids,
            samples=samples,
            run_seed=self._run_seed,
            sampling=rollout_pb2.Sampling(
                temperature=temperature, max_tokens=max_tokens, stop_token_ids=self._stop_token_ids
            ),
            policy_version=version,
        )
        got: dict[int, Trajectory] = {}

        def take(trajectory: Trajectory) -> None:
            trajectories.check(trajectory, prompt.token_ids, max_tokens)
            trajectories.require_version(trajectory, version)
            if trajectory.sample_number not in got:
                got[trajectory.sample_number] = trajectory
                if on_trajectory is not None:
                    on_trajectory(trajectory)

        end = time.monotonic() + deadline_seconds
        failed: set[str] = set()
        asked: dict[str, RolloutClient] = {}
        tries = 0
        while len(got) < samples:
            pause = FIRST_PAUSE_SECONDS * 2**tries
            engine = await self._free_engine(failed)
            asked[engine.worker_id] = engine
            try:
                await self._once(engine, request, end - time.monotonic(), take)
                if len(got) < samples:
                    raise Unavailable(f"{engine.worker_id}: ended {key} with {len(got)} of {samples} trajectories")
            except Overloaded as error:  # alive and honest: bounded by the deadline only
                pause = error.retry_after_seconds
                if time.monotonic() + pause >= end:
                    raise
            except Unavailable:
                failed.add(engine.worker_id)
                tries += 1
                if tries == TRIES:
                    raise
            finally:
                engine.in_flight -= 1
                async with self._freed:
                    self._freed.notify_all()
            if len(got) < samples:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        if keep is not None:
            await keep()
        await asyncio.gather(*(_acknowledge(engine, request.request_id) for engine in asked.values()))
        return [got[number] for number in sorted(got)]

    async def _free_engine(self, avoid: set[str]) -> RolloutClient:
        """The serving engine with the fewest calls, which is one more from now on; waits while all have their most."""
        async with self._freed:
            while True:
                engine = least_loaded(self._workers.serving(), avoid)
                if engine.in_flight < self._calls_per_worker:
                    engine.in_flight += 1
                    return engine
                await self._freed.wait()

    async def _once(
        self, engine: RolloutClient, request: rollout_pb2.GenerateRequest, seconds: float, take: OnTrajectory
    ) -> None:
        async with aclosing(engine.generate(request, seconds)) as stream:
            async for trajectory in stream:
                take(trajectory)


async def _acknowledge(engine: RolloutClient, request_id: str) -> None:
    """Tells an engine that its part is safe. One that does not hear it forgets it by itself, later."""
    try:
        await engine.acknowledge(request_id, ACKNOWLEDGE_SECONDS)
    except AntiphonError as error:
        logger.warning("%s was not told that %s is safe: %s", engine.worker_id, request_id, error)
