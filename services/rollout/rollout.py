"""The worker as a whole: one engine, its life, the calls on it, the updates to it and its sleep."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.config import ProcessConfig
from services.common.errors import Unavailable
from services.common.tenancy import TenantGuard
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, EngineDead
from services.rollout.gate import Gate
from services.rollout.generations import Generations
from services.rollout.holding import Holding
from services.rollout.sleeping import ALL_TAGS, Sleeping
from services.rollout.states import FAILED, STALE, STARTING, STOPPING, Life
from services.rollout.transfer_group import TransferGroup
from services.rollout.updates import Updates

logger = logging.getLogger(__name__)

WATCH_PERIOD_SECONDS = 0.25


class Rollout:
    """Starts the engine, then answers. Parts that need the engine raise Unavailable until it is there."""

    def __init__(
        self,
        process: ProcessConfig[RolloutConfig],
        start_engine: Callable[[ProcessConfig[RolloutConfig]], Awaitable[Engine]],
    ) -> None:
        self.life = Life()
        self.settings = process.settings
        self._process = process
        self._start_engine = start_engine
        self._gate = Gate(self.life, process.settings.max_outstanding)
        self._engine: Engine | None = None
        self._generations: Generations | None = None
        self._sleeping: Sleeping | None = None
        self._updates: Updates | None = None

    async def run(self, guard: TenantGuard | None = None) -> None:
        """Starts the engine and watches it; ends only by raising EngineDead, or whatever the start raised.

        Where the GPUs are shared, by the guard, it starts once they are granted.
        """
        try:
            if guard is not None and guard.shares_gpus:
                await guard.granted(ALL_TAGS, self.settings.grant_seconds)
            engine = await self._start_engine(self._process)
            if guard is not None:
                await self._tell_awake(guard)
        except Exception as error:
            self._failed(f"the engine did not start: {error}")
            raise
        self._engine = engine
        if self.life.state != STARTING:  # stopped meanwhile
            await engine.close()
            return
        holding = Holding(self.settings.hold_trajectories, self.settings.hold_mib * 2**20)
        worker_id = self._process.service.worker_id
        self._generations = Generations(engine, self._gate, holding, worker_id, self.settings.hold_seconds)
        group = TransferGroup(engine)
        self._sleeping = Sleeping(engine, self.life, self._gate, group)
        self._updates = Updates(
            engine,
            self.life,
            self._gate,
            self._sleeping,
            group,
            shares_gpus=self._process.service.shares_gpus,
            commit_seconds=self.settings.commit_seconds,
            probe_seconds=self.settings.probe_seconds,
        )
        self.life.move(STALE, f"{engine.info.backend} is up, no policy was published yet")
        while (problem := self._problem_of(engine)) is None:  # noqa: ASYNC110 - a process that dies sets no event
            await asyncio.sleep(WATCH_PERIOD_SECONDS)
        self._failed(problem)
        raise EngineDead(problem)

    @property
    def engine(self) -> Engine:
        if self._engine is None or self.life.state in (STOPPING, FAILED):
            raise self.life.refusal()
        return self._engine

    @property
    def generations(self) -> Generations:
        if self._generations is None or self.life.state in (STOPPING, FAILED):
            raise self.life.refusal()
        return self._generations

    @property
    def updates(self) -> Updates:
        if self._updates is None or self.life.state in (STOPPING, FAILED):
            raise self.life.refusal()
        return self._updates

    @property
    def sleeping(self) -> Sleeping:
        if self._sleeping is None or self.life.state in (STOPPING, FAILED):
            raise self.life.refusal()
        return self._sleeping

    async def get_state(self) -> tenant_pb2.GetStateResponse:
        """What the worker holds and can do. Raises Unavailable while the engine starts."""
        if self._engine is None or self._sleeping is None:
            raise self.life.refusal()
        info = self._engine.info
        devices = [] if self.life.state in (STOPPING, FAILED) else await self._engine.memory()
        return tenant_pb2.GetStateResponse(
            state=self.life.state,
            policy=self.life.policy,
            backend=info.backend,
            pids=[os.getpid(), *info.pids],
            transfer_ranks=info.transfer_ranks,
            max_sequence_tokens=info.max_sequence_tokens,
            dtype=info.dtype,
            asleep=self._sleeping.asleep,
            devices=[
                tenant_pb2.DeviceMemory(
                    uuid=device.uuid,
                    total_bytes=device.total_bytes,
                    free_bytes=device.free_bytes,
                    held=[tenant_pb2.TaggedMemory(tag=tag, bytes=size) for tag, size in sorted(device.held.items())],
                )
                for device in devices
            ],
        )

    def describe(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        """Fills in what changes in the announcement."""
        announcement.state = self.life.state
        if self.life.policy is not None:
            announcement.policy.CopyFrom(self.life.policy)

    async def health_check(self) -> str | None:
        """None once the engine is up and while it lives; a STALE worker is healthy: it waits for a publication."""
        if self.life.state in (STARTING, STOPPING, FAILED):
            return str(self.life.refusal())
        return None if self._engine is None else self._engine.problem()

    async def drain(self) -> None:
        """Refuses work, ends what is under way, ends the engine."""
        if self.life.state != FAILED:
            self.life.move(STOPPING)
        if self._generations is not None:
            await self._generations.close(Unavailable("the worker is stopping; ask another"))
        if self._updates is not None:
            await self._updates.close()
        if self._engine is not None:
            await self._engine.close()

    async def _tell_awake(self, guard: TenantGuard) -> None:
        try:
            await guard.woke(tenant_pb2.WakeResponse(), ALL_TAGS)
        except Unavailable as error:  # it is said when NATS is back
            logger.warning("that the engine holds its memory was not told yet: %s", error)

    def _problem_of(self, engine: Engine) -> str | None:
        """What makes the worker useless: its engine's, or a state from which nothing leads back."""
        return engine.problem() or (self.life.reason if self.life.state == FAILED else None)

    def _failed(self, reason: str) -> None:
        if self.life.state not in (STOPPING, FAILED):
            self.life.move(FAILED, reason)
