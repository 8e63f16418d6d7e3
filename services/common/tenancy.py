"""Whether a call may touch this worker's GPUs now, and what the worker tells of them (docs/design.md §7).

Why it is enough to ask the log when memory is *taken*: until this worker has said Slept, every later Grant counts what
it holds. So work on memory that is resident goes on while NATS is away; waking waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from antiphon.events.v1 import handoff_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.bus import Bus, end_if_cancelled
from services.common.config import ServiceConfig
from services.common.errors import Conflict, Expired, Unavailable
from services.common.grants import Memory, NodeState, Tag, TenantId, memory_message, tag_name
from services.common.handoff_log import LOOK_AGAIN_SECONDS, Store, SubjectLog, node_subject, until_news
from services.common.handoff_stream import JetStreamStore

logger = logging.getLogger(__name__)


class TenantGuard:
    """The grants of one worker. `run` follows its node's subject; until it does, a worker that shares is not there."""

    def __init__(self, service: ServiceConfig, *, shares_gpus: bool | None = None) -> None:
        self.shares_gpus = service.shares_gpus if shares_gpus is None else shares_gpus
        self.tenant = TenantId(service.run_id, service.worker_id, service.instance_id)
        self._node = service.node
        self._log: SubjectLog[NodeState] | None = None
        self._following = asyncio.Event()
        self._epoch = ""
        self._token = grant_pb2.GrantToken()
        # What the grant of `_token` gave, and of that or earlier grants what this worker took.
        self._granted: Memory = {}
        self._resident: dict[Tag, Mapping[str, int]] = {}
        # Tag → the sequence under which it was given up; that token never takes it again.
        self._given_up: dict[Tag, int] = {}
        self._unsaid: list[handoff_pb2.HandoffEntry] = []
        self._saying = asyncio.Lock()
        self._moving = asyncio.Lock()

    @property
    def token(self) -> grant_pb2.GrantToken:
        """The newest that it acted under; empty before."""
        token = grant_pb2.GrantToken()
        token.CopyFrom(self._token)
        return token

    async def check(self, token: grant_pb2.GrantToken, tags: Collection[Tag] = ()) -> None:
        """Returns when the worker does not share its GPUs, or the token is that of the latest grant of its node that
        names it, and all `tags`. A Wake names the tags that it takes, and checks inside `moving`.

        Raises Conflict (what the latest is, what came, what to do), Unavailable (not known: NATS is away and the tags
        are not resident, or the worker starts).
        """
        if not self.shares_gpus:
            return
        if self._log is None:
            raise Unavailable(f"{self.tenant.worker_id} shares its GPUs and does not follow the grants of its node yet")
        state = self._log.state
        if not self._resident.keys() >= set(tags) or self._problem(state, token, tags) is not None:
            state = await self._refresh(self._log)
            if (problem := self._problem(state, token, tags)) is not None:
                raise Conflict(problem)
        self._act_under(state)

    @asynccontextmanager
    async def moving(self, token: grant_pb2.GrantToken, tags: Collection[Tag] = ()) -> AsyncIterator[None]:
        """`check`, and no other Sleep or Wake until the end: otherwise a Wake that was checked could take memory after
        a Sleep in between gave up the right to it. What was done is said (`slept`, `woke`) inside.
        """
        if not self.shares_gpus:
            yield
            return
        async with self._moving:
            await self.check(token, tags)
            yield

    async def slept(self, response: tenant_pb2.SleepResponse, tags: Collection[Tag]) -> None:
        """Says that the tags' memory was measured to be free. It is said once, however often this is called.

        Raises Unavailable when NATS is away: then it is said when NATS is back, and a repeated Sleep waits for it.
        """
        if not self.shares_gpus:
            return
        for tag in tags:
            self._given_up[tag] = self._token.sequence
            self._resident.pop(tag, None)
        fact = handoff_pb2.Slept(
            tenant=self.tenant.message(), sequence=self._token.sequence, tags=sorted(tags), devices=response.devices
        )
        await self._say(handoff_pb2.HandoffEntry(epoch=self._token.epoch, slept=fact))

    async def woke(self, response: tenant_pb2.WakeResponse, tags: Collection[Tag]) -> None:
        """Says that the tags' memory was taken, and how much was measured. Raises as `slept` does."""
        if not self.shares_gpus:
            return
        self._resident.update({tag: self._granted.get(tag, {}) for tag in tags})
        if self._token.epoch != self._epoch:  # the stream was lost between check and effect
            await self._say(self._kept())
            return
        fact = handoff_pb2.Woke(
            tenant=self.tenant.message(), sequence=self._token.sequence, tags=sorted(tags), devices=response.devices
        )
        await self._say(handoff_pb2.HandoffEntry(epoch=self._token.epoch, woke=fact))

    async def granted(self, tags: Collection[Tag], deadline_seconds: float) -> grant_pb2.GrantToken:
        """Waits for a grant of these tags: for what takes memory at the start of the process. Raises Expired."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._following.wait()
                assert self._log is not None
                state = await self._log.wait_for(lambda state: self._has(state, tags))
        except TimeoutError:
            names = ", ".join(tag_name(tag) for tag in sorted(tags))
            raise Expired(
                f"{self.tenant.worker_id}: no grant of {names} on {self._node} after {deadline_seconds:.0f} s; a "
                "coordinator appends it when its turn comes"
            ) from None
        self._act_under(state)
        return self.token

    async def run(self, bus: Bus) -> None:
        """Follows the grants until cancelled; NATS that is away is waited for. Raises ConfigError for its settings."""
        while True:
            try:
                store = await JetStreamStore.open(bus)
                break
            except Unavailable as error:
                logger.warning("grants: %s; trying again", error)
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        await self.follow(store)

    async def follow(self, store: Store) -> None:
        """As `run`, on a stream that is open."""
        log = SubjectLog(store, node_subject(self._node), NodeState, NodeState.apply)
        self._log = log
        self._following.set()
        heard = True
        while True:
            news = log.news()
            try:
                await self._refresh(log)
                await self._say_all(log)
            except Unavailable as error:
                if heard:
                    logger.warning("grants of %s: %s; trying again", self._node, error)
                heard = False
            else:
                heard = True
            end_if_cancelled()
            await until_news(news)

    def _act_under(self, state: NodeState) -> None:
        holding = state.holdings[self.tenant]
        self._token = grant_pb2.GrantToken(epoch=state.epoch, sequence=holding.sequence)
        self._granted = holding.memory

    async def _refresh(self, log: SubjectLog[NodeState]) -> NodeState:
        state = await log.refresh()
        if state.epoch != self._epoch:
            # All tokens are void. What is resident is said, so that it counts and can be put to sleep.
            self._epoch = state.epoch
            self._given_up.clear()
            self._unsaid.clear()
            if self._resident:
                self._unsaid.append(self._kept())
        return state

    def _kept(self) -> handoff_pb2.HandoffEntry:
        kept = handoff_pb2.Kept(tenant=self.tenant.message(), memory=memory_message(self._resident))
        return handoff_pb2.HandoffEntry(epoch=self._epoch, kept=kept)

    async def _say(self, entry: handoff_pb2.HandoffEntry) -> None:
        self._unsaid.append(entry)
        if self._log is None:
            raise Unavailable(f"{self.tenant.worker_id} does not follow the grants of its node yet")
        await self._say_all(self._log)

    async def _say_all(self, log: SubjectLog[NodeState]) -> None:
        """Appends what was not said yet, in order. Once is enough, twice does no harm."""
        async with self._saying:
            while self._unsaid:
                state = await self._refresh(log)
                if not self._unsaid:  # a new epoch made it pointless
                    break
                entry = self._unsaid[0]
                if entry.epoch == state.epoch and not self._is_said(state, entry):
                    await log.append(entry)
                if self._unsaid and self._unsaid[0] is entry:
                    del self._unsaid[0]

    def _is_said(self, state: NodeState, entry: handoff_pb2.HandoffEntry) -> bool:
        """Whether the log has it, or it would have no effect there."""
        holding = state.holdings.get(self.tenant)
        if entry.HasField("kept"):
            return holding is not None and holding.memory.keys() >= {part.tag for part in entry.kept.memory}
        fact = entry.slept if entry.HasField("slept") else entry.woke
        if holding is None or holding.sequence != fact.sequence:
            return True
        if entry.HasField("slept"):
            return holding.memory.keys().isdisjoint(fact.tags)
        return holding.awake >= set(fact.tags) & holding.memory.keys()

    def _has(self, state: NodeState, tags: Collection[Tag]) -> bool:
        holding = state.holdings.get(self.tenant)
        return holding is not None and holding.memory.keys() >= set(tags)

    def _problem(self, state: NodeState, token: grant_pb2.GrantToken, tags: Collection[Tag]) -> str | None:
        """Why the token does not allow it, and what to do."""
        if not token.epoch:
            return f"{self.tenant.worker_id} shares its GPUs: a call that touches them carries the token of its grant"
        came = f"{self.tenant.worker_id}: token {token.sequence} of epoch {token.epoch}"
        if token.epoch != state.epoch:
            return f"{came} is void: the stream's epoch is {state.epoch}; ask for a new grant"
        holding = state.holdings.get(self.tenant)
        if holding is None:
            return f"{came} does not hold: no grant of {self._node} names this worker now; ask for one"
        if holding.sequence != token.sequence:
            return f"{came} does not hold: the latest grant of {self._node} that names it is {holding.sequence}"
        given_up = {tag for tag, sequence in self._given_up.items() if sequence == token.sequence}
        missing = [tag for tag in sorted(tags) if tag not in holding.memory or tag in given_up]
        if missing:
            names = ", ".join(tag_name(tag) for tag in missing)
            has = ", ".join(tag_name(tag) for tag in sorted(holding.memory.keys() - given_up)) or "nothing"
            return f"{came} does not allow {names}: of what it gave, {has} is left; ask for a new grant"
        return None
