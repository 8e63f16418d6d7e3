"""Who may sample now: requests are counted, held while an update or a drain is under way, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from antiphon.types.v1.policy_pb2 import Policy

from services.common.errors import Conflict, Expired, InvalidRequest, Overloaded
from services.rollout.holding import RETRY_AFTER_SECONDS
from services.rollout.states import READY, UPDATING, Life


class Gate:
    """Between the requests and the engine. Counts trajectories: `outstanding` are asked for, `running` are sampled."""

    def __init__(self, life: Life, max_outstanding: int) -> None:
        self._life = life
        self._max_outstanding = max_outstanding
        self._idle = asyncio.Event()
        self._idle.set()
        self._drained: asyncio.Event | None = None
        self.outstanding = 0
        self.running = 0

    def reserve(self, count: int) -> None:
        """Takes room for `count` trajectories; give it back with `release`.

        Raises Unavailable in a state that refuses work, InvalidRequest for more than there ever is room for, Overloaded
        when there is none now.
        """
        if self._life.state not in (READY, UPDATING):
            raise self._life.refusal()
        if count > self._max_outstanding:
            raise InvalidRequest(
                f"{count} trajectories in one call; this worker takes {self._max_outstanding} at a time "
                "(max_outstanding): ask for fewer"
            )
        if self.outstanding + count > self._max_outstanding:
            raise Overloaded(
                f"{self.outstanding} trajectories are asked for; with {count} more they exceed {self._max_outstanding}",
                RETRY_AFTER_SECONDS,
            )
        self.outstanding += count

    def release(self, count: int) -> None:
        self.outstanding -= count

    async def enter(self, wanted_version: int | None) -> Policy:
        """Waits while an update or a drain is under way, then lets one trajectory run under the policy it answers.

        `leave` after. Raises Conflict when that is not the version wanted, Unavailable when there is no verified policy
        then.
        """
        while self._drained is not None or self._life.state == UPDATING:
            if self._drained is not None:
                await self._drained.wait()
            else:
                await self._life.wait_change()
        if self._life.state != READY or self._life.policy is None:
            raise self._life.refusal()
        policy = self._life.policy
        if wanted_version is not None and wanted_version != policy.version:
            raise Conflict(f"policy version {wanted_version} was asked for; this worker serves {policy.version}")
        self.running += 1
        self._idle.clear()
        return policy

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    @property
    def draining(self) -> bool:
        return self._drained is not None

    @asynccontextmanager
    async def drained(self, deadline_seconds: float) -> AsyncIterator[None]:
        """Holds new requests, and enters once nothing runs; they go on, or are refused, after it.

        Raises Conflict when another drain is under way, Expired at the deadline.
        """
        if self._drained is not None:
            raise Conflict("the engine is being drained by another request already")
        self._drained = asyncio.Event()
        try:
            await self.idle(deadline_seconds)
            yield
        finally:
            self._drained.set()
            self._drained = None

    async def idle(self, deadline_seconds: float) -> None:
        """Waits until nothing runs. Raises Expired at the deadline."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._idle.wait()
        except TimeoutError:
            raise Expired(
                f"{self.running} trajectories were still being sampled after {deadline_seconds:.1f} s"
            ) from None
