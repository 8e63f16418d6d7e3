"""Stands in for the grants of shared GPUs, in the contract tests of a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.errors import Conflict

WEIGHTS, KV = grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_KV


class Guard:
    """Stands in for the grants: takes one token, and keeps what it was told."""

    def __init__(self) -> None:
        self.shares_gpus = False
        self.token = grant_pb2.GrantToken()
        self.allowed = {WEIGHTS, KV}
        self.told: list[tuple[str, Any, set[int]]] = []
        self.tell_error: Exception | None = None
        self.may_start = asyncio.Event()
        self.moves = 0
        """Sleeps and Wakes that came so far."""
        self._moving = asyncio.Lock()

    async def granted(self, tags: Collection[grant_pb2.MemoryTag], deadline_seconds: float) -> grant_pb2.GrantToken:
        assert set(tags) == {WEIGHTS, KV} and deadline_seconds > 0
        await self.may_start.wait()
        return self.token

    async def check(self, token: grant_pb2.GrantToken, tags: Collection[grant_pb2.MemoryTag] = ()) -> None:
        if not self.shares_gpus:
            return
        if token.sequence != 7:
            raise Conflict(f"the latest grant is 7, the token is of {token.sequence}")
        if not set(tags) <= self.allowed:
            raise Conflict(f"grant 7 does not name {sorted(set(tags) - self.allowed)}")
        self.token = token

    @asynccontextmanager
    async def moving(
        self, token: grant_pb2.GrantToken, tags: Collection[grant_pb2.MemoryTag] = ()
    ) -> AsyncIterator[None]:
        self.moves += 1
        async with self._moving:
            await self.check(token, tags)
            yield

    async def slept(self, response: tenant_pb2.SleepResponse, tags: Collection[grant_pb2.MemoryTag]) -> None:
        await self._tell("slept", response, tags)
        if self.shares_gpus:
            self.allowed = self.allowed - set(tags)  # given up under this token

    async def woke(self, response: tenant_pb2.WakeResponse, tags: Collection[grant_pb2.MemoryTag]) -> None:
        await self._tell("woke", response, tags)

    async def _tell(self, what: str, response: Any, tags: Collection[grant_pb2.MemoryTag]) -> None:
        if self.tell_error is not None:
            raise self.tell_error
        self.told.append((what, response, set(tags)))
