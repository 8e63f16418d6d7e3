"""Handing GPUs over: who may have memory resident next (docs/design.md §7).

    claim the nodes ▶ wait for the turn ▶ per node, all at once:
        holders that must give up: Sleep under their token ▶ their Slept (or Exited) is on the log
        ▶ the next Grant, appended only if nothing came in between
        ▶ its tenants: Wake under it ▶ their Woke is on the log

What is on the log is what counts; an answer to a call only says when to look. So any step may be repeated, by this
coordinator or the next one of the run. A tenant is dead when its supervisor said so, never because it is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.events.v1 import handoff_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.client import new_request_id
from services.common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from services.common.grants import (
    Holding,
    Memory,
    NodeState,
    OpenClaim,
    Tag,
    TenantId,
    described,
    gib,
    overfull,
    share_of,
    tag_name,
)
from services.common.handoff_log import CLAIMS_SUBJECT, Refused, Store, SubjectLog, until_news
from services.coordinator.handoff_view import HandoffView
from services.coordinator.waits import cancelled, together

logger = logging.getLogger(__name__)

# Between two calls to a tenant that did not do what it was asked for.
RETRY_SECONDS = 1.0
# The worker's own error at the deadline is better than the caller's.
CALL_MARGIN_SECONDS = 1.0
# Of different errors of one tenant the last ones: that it cannot be reached any more says little.
ERRORS_TOLD = 2
# Allocators take whole blocks.
ROUNDING_BYTES = 64 << 20


class Tenant(Protocol):
    """A worker that shares GPUs, as it is called (clients.py)."""

    worker_id: str
    instance_id: str

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse: ...

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse: ...


@dataclass(frozen=True)
class Wish:
    """What one tenant is to have next. Example: an engine with {WEIGHTS: {gpu: 6 GiB}, KV: {gpu: 60 GiB}}."""

    tenant: Tenant
    node: str
    memory: Memory
    wake: frozenset[Tag] | None = None
    """The tags to be woken by the hand-over; None: all. KV over discarded weights is woken by the publication."""

    @property
    def awake(self) -> frozenset[Tag]:
        return frozenset(self.memory) if self.wake is None else self.wake


class Handoff:
    """The hand-overs of one run, one at a time.

    `capacity`: node → GPU uuid → bytes to grant there, which is what the device has without what its processes hold
    outside of all tags (contexts). `tenants` answers the run's own that can be called.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        instance_id: str,
        capacity: Mapping[str, Mapping[str, int]],
        tenants: Callable[[], Iterable[Tenant]],
    ) -> None:
        self._log = HandoffView(store)
        self._run_id = run_id
        self._instance_id = instance_id
        self._capacity = capacity
        self._tenants = tenants

    async def to(
        self, wishes: Sequence[Wish], *, deadline_seconds: float, discard_weights: Collection[str] = ()
    ) -> dict[str, grant_pb2.GrantToken]:
        """Gives the nodes of the wishes to them: the run's other tenants there sleep. Answers each node's token.

        Workers in `discard_weights` need not keep theirs. Safe to repeat after any error.
        Raises InvalidRequest before anything is touched (what can never fit, with the equation); Expired at the
        deadline, with whom it waited for; StreamLost; Unavailable when a tenant that was wished for has exited; what a
        tenant answered that no repetition helps.
        """
        by_node: dict[str, list[Wish]] = {}
        for wish in wishes:
            by_node.setdefault(wish.node, []).append(wish)
        self._refuse_what_never_fits(by_node)
        nodes = frozenset(by_node)
        async with self._log.within(deadline_seconds, f"hand-over on {', '.join(sorted(nodes))}"):
            await self._turn(nodes)
            tokens = await together(
                [self._hand_over(node, by_node[node], nodes, discard_weights) for node in sorted(nodes)]
            )
        return dict(zip(sorted(nodes), tokens, strict=True))

    async def claim(self, nodes: Collection[str], *, deadline_seconds: float) -> None:
        """Waits for the run's turn on all these nodes; `to` does it by itself, for those that it needs."""
        async with self._log.within(deadline_seconds, f"claim to {', '.join(sorted(nodes))}"):
            await self._turn(frozenset(nodes))

    async def waiting_runs(self, deadline_seconds: float) -> list[str]:
        """Runs that wait for a node that this one has: a reason to `release` between two phases."""
        async with self._log.within(deadline_seconds, "looking for claims of others"):
            claims = await self._log.read(self._log.claims)
        own = claims.of(self._run_id)
        return [] if own is None else [claim.run_id for claim in claims.behind(own)]

    async def release(self, *, deadline_seconds: float, discard_weights: Collection[str] = ()) -> None:
        """Puts what the run has on its nodes to sleep and ends its claim: the next run's turn. Errors as in `to`."""
        async with self._log.within(deadline_seconds, "release"):
            while (own := (await self._log.read(self._log.claims)).of(self._run_id)) is not None:
                await together([self._give_up(node, discard_weights) for node in sorted(own.nodes)])
                news = self._log.claims.news()
                released = handoff_pb2.Released(run_id=self._run_id, position=own.position)
                try:
                    await self._log.claims.append(handoff_pb2.HandoffEntry(released=released))
                except Unavailable as error:
                    self._log.waiting[CLAIMS_SUBJECT] = str(error)
                    await until_news(news)

    # The steps

    async def _turn(self, nodes: frozenset[str]) -> OpenClaim:
        """The run's claim, once it is the oldest on each of its nodes. Who waits holds nothing that others wait for."""
        while True:
            news = self._log.claims.news()
            claims = await self._log.read(self._log.claims)
            own = claims.of(self._run_id)
            if own is None or own.instance_id != self._instance_id or not own.nodes >= nodes:
                wanted = nodes if own is None else nodes | own.nodes
                claim = claims.claim(self._run_id, self._instance_id, wanted)
                try:
                    await self._log.claims.append(handoff_pb2.HandoffEntry(claim=claim), claims)
                except (Refused, Unavailable) as error:
                    self._log.waiting[CLAIMS_SUBJECT] = str(error)
                    await until_news(news)
                continue
            ahead = claims.ahead(own, own.nodes)
            if not ahead:
                self._log.waiting.pop(CLAIMS_SUBJECT, None)
                return own
            self._log.waiting[CLAIMS_SUBJECT] = f"its turn after {', '.join(str(claim) for claim in ahead)}"
            wanted_by_others = own.nodes & frozenset[str]().union(*(claim.nodes for claim in ahead))
            await together([self._give_up(node, ()) for node in sorted(wanted_by_others)])
            await until_news(news)

    async def _hand_over(
        self, node: str, wishes: Sequence[Wish], nodes: frozenset[str], discard_weights: Collection[str]
    ) -> grant_pb2.GrantToken:
        log = self._log.node(node)
        # Always a new grant: a call under an older one that is on its way still then comes to nothing.
        begin = (await self._log.read(log)).sequence
        while True:
            claim = await self._turn(nodes)
            news = log.news()
            state = await self._log.read(log)
            for wish in wishes:
                if self._id(wish.tenant) in state.exited:
                    raise _named(Unavailable(f"{wish.tenant.worker_id} has exited; {node} cannot be given to it"), wish)
            giving_up = self._giving_up(state, wishes)
            if giving_up:
                await together([self._sleep(log, *part, discard_weights) for part in giving_up])
                continue
            sequence = self._granted(state, wishes)
            if sequence > begin:
                if all(_is_awake(state.holdings[self._id(wish.tenant)], wish) for wish in wishes):
                    return grant_pb2.GrantToken(epoch=state.epoch, sequence=sequence)
                await together([self._wake(log, wish, wishes, sequence) for wish in wishes])
                continue
            shares = [share_of(self._id(wish.tenant), wish.memory) for wish in wishes]
            grant = state.grant(self._run_id, claim.position, shares)
            problems = state.may_append(grant, self._capacity.get(node, {}), self._log.claims.state, node)
            try:
                if not problems:
                    await log.append(handoff_pb2.HandoffEntry(grant=grant), state)
            except (Refused, Unavailable) as error:
                problems = [str(error)]
            if problems:  # what others hold: they sleep or exit
                self._log.waiting[node] = "; ".join(problems)
                await until_news(news)
            else:
                self._log.waiting.pop(node, None)

    async def _give_up(self, node: str, discard_weights: Collection[str]) -> None:
        """Puts all that the run has on a node to sleep."""
        log = self._log.node(node)
        while giving_up := self._giving_up(await self._log.read(log), ()):
            await together([self._sleep(log, *part, discard_weights) for part in giving_up])

    async def _sleep(
        self, log: SubjectLog[NodeState], tenant_id: TenantId, tags: frozenset[Tag], discard_weights: Collection[str]
    ) -> None:
        """Returns when the tags are not the tenant's any more under the token it has now, or that is another."""
        token = log.state.token(tenant_id)
        assert token is not None
        names = ", ".join(tag_name(tag) for tag in sorted(tags))

        def done(state: NodeState) -> bool:
            holding = state.holdings.get(tenant_id)
            return holding is None or holding.sequence != token.sequence or holding.memory.keys().isdisjoint(tags)

        async def call() -> None:
            tenant = next((t for t in self._tenants() if self._id(t) == tenant_id), None)
            if tenant is None:
                raise Unavailable("nobody knows how to call it, and its supervisor has not said that it ended")
            request = tenant_pb2.SleepRequest(
                request_id=new_request_id(),
                tags=sorted(tags),
                discard_weights=tenant_id.worker_id in discard_weights,
                token=token,
                deadline_seconds=self._log.seconds_left,
            )
            await tenant.sleep(request, self._log.seconds_left + CALL_MARGIN_SECONDS)

        await self._ask(log, tenant_id, f"{tenant_id} to give up {names}", call, done)

    async def _wake(self, log: SubjectLog[NodeState], wish: Wish, wishes: Sequence[Wish], sequence: int) -> None:
        """Returns when the tenant woke, or one of the run's must give something up first: after a lost stream a tenant
        may say only now what it has kept.
        """
        tenant_id = self._id(wish.tenant)
        tags = wish.awake
        names = ", ".join(tag_name(tag) for tag in sorted(tags))
        token = grant_pb2.GrantToken(epoch=log.state.epoch, sequence=sequence)

        def done(state: NodeState) -> bool:
            holding = state.holdings.get(tenant_id)
            moved = holding is None or holding.sequence != sequence
            return moved or _is_awake(holding, wish) or bool(self._giving_up(state, wishes))

        async def call() -> None:
            request = tenant_pb2.WakeRequest(
                request_id=new_request_id(), tags=sorted(tags), token=token, deadline_seconds=self._log.seconds_left
            )
            response = await wish.tenant.wake(request, self._log.seconds_left + CALL_MARGIN_SECONDS)
            _compare(wish, tags, response)

        state, told = await self._ask(log, tenant_id, f"{tenant_id} to wake {names}", call, done)
        holding = state.holdings.get(tenant_id)
        if tenant_id in state.exited:
            raise _named(Unavailable(f"{wish.tenant.worker_id} exited before it woke {names}{told}"), wish)
        if holding is None or holding.sequence != sequence:
            raise _named(
                Conflict(f"{wish.tenant.worker_id}: grant {sequence} was overtaken before it woke{told}"), wish
            )

    async def _ask(
        self,
        log: SubjectLog[NodeState],
        tenant_id: TenantId,
        what: str,
        call: Callable[[], Awaitable[None]],
        done: Callable[[NodeState], bool],
    ) -> tuple[NodeState, str]:
        """Calls, again if need be, until the log has the effect or the tenant's end; answers the state that has it, and
        in words the last errors of the tenant.

        An error that a repetition may mend is told at the deadline.
        """
        if done(state := await self._log.read(log)):
            return state, ""
        errors: list[str] = []
        self._log.waiting[tenant_id] = what
        seen = asyncio.ensure_future(self._log.until(log, lambda state: tenant_id in state.exited or done(state)))
        asked: asyncio.Future[None] = seen  # type: ignore[assignment]
        try:
            while True:
                asked = asyncio.ensure_future(call())
                await asyncio.wait({seen, asked}, return_when=asyncio.FIRST_COMPLETED)
                if not seen.done():
                    try:
                        asked.result()
                        self._log.waiting[tenant_id] = f"{what}: it answered, and has not said so on {log.subject}"
                    except (Unavailable, Overloaded, Conflict) as error:
                        self._log.waiting[tenant_id] = f"{what}: {error}"
                        errors = [*(text for text in errors if text != str(error)), str(error)]
                    await asyncio.wait({seen}, timeout=RETRY_SECONDS)
                if seen.done():
                    if tenant_id not in seen.result().exited:
                        await asyncio.wait({asked}, timeout=RETRY_SECONDS)  # its answer comes right behind
                    return seen.result(), "".join(f"; it said: {error}" for error in errors[-ERRORS_TOLD:])
        finally:
            await cancelled(seen, asked)
            if seen.done() and not seen.cancelled() and seen.exception() is None:
                self._log.waiting.pop(tenant_id, None)

    # What the log says

    def _giving_up(self, state: NodeState, wishes: Sequence[Wish]) -> list[tuple[TenantId, frozenset[Tag]]]:
        """The run's tenants that have more than is wished for them, with the tags."""
        wished = {self._id(wish.tenant): wish.memory for wish in wishes}
        found = []
        for tenant_id, holding in sorted(state.holdings.items()):
            memory = wished.get(tenant_id, {})
            tags = frozenset(
                tag
                for tag, gpus in holding.memory.items()
                if tag not in memory or any(memory[tag].get(gpu, 0) < size for gpu, size in gpus.items())
            )
            if tenant_id.run_id == self._run_id and tags:
                found.append((tenant_id, tags))
        return found

    def _granted(self, state: NodeState, wishes: Sequence[Wish]) -> int:
        """The sequence of the grant that gave exactly what is wished for; 0 when there is none."""
        holdings = [state.holdings.get(self._id(wish.tenant)) for wish in wishes]
        sequences = {0 if holding is None else holding.sequence for holding in holdings}
        same = all(h is not None and h.memory == w.memory for h, w in zip(holdings, wishes, strict=True))
        return sequences.pop() if same and len(sequences) == 1 else 0

    # Small things

    def _id(self, tenant: Tenant) -> TenantId:
        return TenantId(self._run_id, tenant.worker_id, tenant.instance_id)

    def _refuse_what_never_fits(self, by_node: Mapping[str, Sequence[Wish]]) -> None:
        problems = [] if by_node else ["nobody is wished for; to give everything up, use `release`"]
        for node, wishes in by_node.items():
            ids = [self._id(wish.tenant) for wish in wishes]
            problems += [f"{one} is wished for twice" for one in sorted({i for i in ids if ids.count(i) > 1})]
            shares = [share_of(one, wish.memory) for one, wish in zip(ids, wishes, strict=True)]
            problems += [
                f"{node}: {problem}"
                for problem in overfull(handoff_pb2.Grant(shares=shares), self._capacity.get(node, {}))
            ]
        if problems:
            raise InvalidRequest("the hand-over can never fit:\n" + "\n".join(f"  {problem}" for problem in problems))


def _is_awake(holding: Holding | None, wish: Wish) -> bool:
    return holding is not None and holding.awake >= wish.awake


def _compare(wish: Wish, tags: Collection[Tag], response: tenant_pb2.WakeResponse) -> None:
    """Warns of a tenant that took more than it was granted: the sums of later grants are then wrong."""
    for device in response.devices:
        taken = device.free_bytes_before - device.free_bytes_after
        granted = sum(wish.memory[tag].get(device.uuid, 0) for tag in tags)
        if taken > granted + ROUNDING_BYTES:
            parts = ", ".join(described(tag, wish.memory[tag]) for tag in sorted(tags))
            logger.warning(
                "%s took %s on %s, and was granted %s there (%s)",
                wish.tenant.worker_id, gib(taken), device.uuid, gib(granted), parts,
            )  # fmt: skip


def _named(error: Any, wish: Wish) -> Any:
    error.worker_id = wish.tenant.worker_id
    return error
