"""The log of grants as one run's coordinator sees it: under a deadline that tells who was waited for.

NATS that is away is waited for; a stream that was lost is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from services.common.errors import Conflict, Expired, Unavailable
from services.common.grants import ClaimsState, NodeState
from services.common.handoff_log import CLAIMS_SUBJECT, Store, SubjectLog, node_subject, until_news

Folded = TypeVar("Folded", NodeState, ClaimsState)


class StreamLost(Conflict):
    """NATS lost the stream: all grants and claims are void. The next hand-over begins anew, in the new epoch."""


class HandoffView:
    """The claims and the nodes, one operation at a time. `waiting`: what is waited for, in words, by whom or where."""

    def __init__(self, store: Store) -> None:
        self.claims = SubjectLog(store, CLAIMS_SUBJECT, ClaimsState, ClaimsState.apply)
        self.waiting: dict[object, str] = {}
        self._store = store
        self._nodes: dict[str, SubjectLog[NodeState]] = {}
        self._epoch = ""
        self._end = 0.0

    def node(self, node: str) -> SubjectLog[NodeState]:
        if node not in self._nodes:
            self._nodes[node] = SubjectLog(self._store, node_subject(node), NodeState, NodeState.apply)
        return self._nodes[node]

    @asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[None]:
        """Bounds what is awaited inside. Raises Expired naming it, and what was waited for."""
        self.waiting.clear()
        self._end = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            waiting = "; ".join(self.waiting.values()) or "nobody"
            raise Expired(f"{what}: not done after {seconds:.0f} s; waiting for {waiting}") from None

    @property
    def seconds_left(self) -> float:
        """Until the deadline, for calls; more than 0."""
        return max(self._end - asyncio.get_running_loop().time(), 0.001)

    async def until(self, log: SubjectLog[Folded], condition: Callable[[Folded], bool]) -> Folded:
        """The first state that fulfils the condition. Raises StreamLost."""
        while True:
            news = log.news()
            state = await self.read(log)
            if condition(state):
                return state
            await until_news(news)

    async def read(self, log: SubjectLog[Folded]) -> Folded:
        """The subject's state now. Raises StreamLost."""
        while True:
            news = log.news()
            try:
                state = await log.refresh()
            except Unavailable as error:
                self.waiting[log] = str(error)
                await until_news(news)
                continue
            self.waiting.pop(log, None)
            if state.epoch != self._epoch:
                before, self._epoch = self._epoch, state.epoch
                if before:
                    raise StreamLost(
                        f"NATS lost the stream of grants: epoch {before} became {state.epoch}, all grants and claims "
                        "are void. Hand over again: it begins anew, with what the tenants say that they hold"
                    )
            return state
