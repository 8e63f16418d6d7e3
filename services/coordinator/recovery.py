"""Services that die while the run goes on, and come back as another life of the same worker (docs/design.md §8).

    learner   the newest checkpoint and the stored Batches after it bring it to where the run is, before it is used
    engines   the published policy goes to each that comes up beside the others, before it is used
    reward    is only asked again (services/coordinator/scoring.py)

Who is waited for, and how long, is told. Whether somebody died is asked of the workers, never guessed from silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from antiphon.types.v1 import policy_pb2

from services.common.errors import AntiphonError, Unavailable
from services.coordinator.clients import LearnerClient
from services.coordinator.config import CoordinatorConfig
from services.coordinator.events import EventLog
from services.coordinator.ledger import Ledger
from services.coordinator.publication import Publication
from services.coordinator.resuming import Stored, catch_up
from services.coordinator.workers import LEARNER, ROLLOUT, Life, Workers, life_of

Answer = TypeVar("Answer")

AGAIN_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Recovery:
    """Brings back what died. One for the life of a coordinator."""

    def __init__(
        self,
        workers: Workers,
        ledger: Ledger,
        *,
        config: CoordinatorConfig,
        events: EventLog,
        read_stored: Callable[[], Awaitable[Stored]],
    ) -> None:
        """`read_stored` reads the ledger as it stands."""
        self._workers = workers
        self._ledger = ledger
        self._config = config
        self._events = events
        self._read_stored = read_stored
        self._learner_life: Life | None = None
        self._catching_up = asyncio.Lock()
        self._mourned: set[Life] = set()
        self.turn = asyncio.Lock()
        """Held while the policy changes or travels: training and publishing, to all engines or to one that came."""
        self.policy = policy_pb2.Policy()
        """That the learner had when it was brought to the last stored Batch."""

    async def learner(self) -> LearnerClient:
        """The learner, holding what the last stored Batch made. Raises what bringing it there raises."""
        async with self._catching_up:
            learner = self._workers.learner()
            if life_of(learner) != self._learner_life:
                if self._learner_life is not None:
                    self._events.notice("warning", f"{learner.worker_id} is another life: it is brought to this run")
                await self._bring(learner)
            return learner

    def learner_at_hand(self) -> LearnerClient:
        """The learner as it was left, for the end of a run, which waits for nobody. Raises Unavailable for another
        life.
        """
        learner = self._workers.learner()
        if life_of(learner) != self._learner_life:
            raise Unavailable(f"{learner.worker_id} was started again, and holds nothing of this run yet")
        return learner

    async def through(self, what: str, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The result of work with learner and engines, which may be repeated. Where one of them died meanwhile it is
        begun again, once there are a learner and an engine that answer; its error is raised where nobody did.
        """
        while True:
            before = self._lives()
            try:
                return await work()
            except AntiphonError as error:
                if not self._config.replacement_seconds or not (died := await self._died(before)):
                    raise
                await self._wait(what, died, error)

    async def keep_engines(self, publication: Publication) -> None:
        """Publishes to engines that come up while others work, or none does. Until cancelled."""
        pause = AGAIN_SECONDS
        while True:
            await self._workers.wait_for_newcomer()
            async with self.turn:
                newcomers = [e for e in await self._workers.answering_now(ROLLOUT) if not self._workers.serves(e)]
                if newcomers and publication.published is not None:
                    names = ", ".join(engine.worker_id for engine in newcomers)
                    version = publication.published.version
                    try:
                        await publication.publish(version, only=newcomers)
                        self._events.notice("info", f"{names} came up, and serves version {version}")
                        pause = AGAIN_SECONDS
                        continue
                    except AntiphonError as error:
                        self._events.notice("warning", f"version {version} did not reach {names}: {error}")
                        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause)

    async def _bring(self, learner: LearnerClient) -> None:
        stored = await self._read_stored()
        self.policy = await catch_up(
            stored,
            learner,
            self._ledger,
            load_seconds=self._config.checkpoint.seconds,
            train_seconds=self._config.train_seconds,
            tell=self._events.notice,
            on_progress=lambda p: self._events.progress(p.done, p.of, p.phase),
        )
        self._learner_life = life_of(learner)

    def _lives(self) -> set[Life]:
        return {life_of(client) for kind in (LEARNER, ROLLOUT) for client in self._workers.clients(kind)}

    async def _died(self, before: set[Life]) -> set[Life]:
        """Those lives that were replaced or do not answer. Each counts once: what fails again without another death
        is an error.
        """
        answering = {
            life_of(client) for kind in (LEARNER, ROLLOUT) for client in await self._workers.answering_now(kind)
        }
        died = before - answering - self._mourned
        self._mourned |= died
        return died

    async def _wait(self, what: str, died: set[Life], error: AntiphonError) -> None:
        seconds = self._config.replacement_seconds
        names = ", ".join(sorted(worker_id for worker_id, _ in died))
        self._events.notice(
            "warning", f"{what} broke and is begun again once {names} is back, {seconds:.0f} s at most: {error}"
        )
        self._events.progress(0, 0, f"waiting for {names}")
        self._workers.routing -= died
        for kind in (LEARNER, ROLLOUT):
            try:
                await self._workers.answering(kind, seconds)
            except Unavailable as nobody:
                raise type(error)(f"{error}; {nobody}") from None
