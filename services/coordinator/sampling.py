"""Trajectories of one prompt from an engine that serves the wanted policy; elsewhere or again when one cannot.

An engine that failed a prompt a few times gets no more of any until the policy was published to it again, or to its
replacement; where no other is left, that is waited for.
"""

from __future__ import annotations

import asyncio
import collections
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
from services.coordinator.workers import Life, Workers, least_loaded, life_of

logger = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 2.0

OnTrajectory = Callable[[Trajectory], None]


class Sampler:
    """Asks engines for trajectories. At most `calls_per_worker` calls per engine are under way."""

    def __init__(
        self, workers: Workers, *, run_id: str, run_seed: int, stop_token_ids: list[int], calls_per_worker: int
    ) -> None:
        self._workers = workers
        self._run_id = run_id
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
        were asked are told that they may forget them. Until then the id is the same after a restart of this process,
        too: an engine that holds some of them delivers them again. Raises Unavailable when a few tries, elsewhere
        first, did not help, and nobody came back who may; Conflict when an engine serves another version; what `keep`
        raises.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=new_request_id() if keep is None else f"{self._run_id}/{key}/v{version}",
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
        failures: collections.Counter[Life] = collections.Counter()
        asked: dict[Life, RolloutClient] = {}
        while len(got) < samples:
            pause = FIRST_PAUSE_SECONDS
            engine = await self._free_engine({worker_id for worker_id, _ in failures}, end)
            life = life_of(engine)
            asked[life] = engine
            try:
                await self._once(engine, request, end - time.monotonic(), take)
                if len(got) < samples:
                    raise Unavailable(f"{engine.worker_id}: ended {key} with {len(got)} of {samples} trajectories")
            except Overloaded as error:  # alive and honest: bounded by the deadline only
                pause = error.retry_after_seconds
                if time.monotonic() + pause >= end:
                    raise
            except Unavailable:
                pause = FIRST_PAUSE_SECONDS * 2 ** failures[life]
                failures[life] += 1
                if self._hopeless(failures, life):
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

    def _hopeless(self, failures: collections.Counter[Life], life: Life) -> bool:
        """Whether there is nothing left to try after one more failure at this life of an engine."""
        if not self._workers.replacement_seconds:
            return failures.total() == TRIES
        if failures[life] == TRIES:
            self._workers.routing.discard(life)
        return failures[life] > TRIES  # it was published to again, and is no better

    async def _free_engine(self, avoid: set[str], end: float) -> RolloutClient:
        """The serving engine with the fewest calls, which is one more from now on; waits while all have their most, and
        where none serves for one that will.
        """
        while True:
            async with self._freed:
                while serving := self._workers.serving():
                    engine = least_loaded(serving, avoid)
                    if engine.in_flight < self._calls_per_worker:
                        engine.in_flight += 1
                        return engine
                    await self._freed.wait()
            await self._workers.wait_serving(min(self._workers.replacement_seconds, end - time.monotonic()))

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
