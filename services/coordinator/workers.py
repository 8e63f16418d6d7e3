"""The live workers of the run, by kind, as they announce themselves, each with a client.

Silence is not death: when nobody of a kind is heard of, the last ones known are still called, and the call itself shows
within seconds whether somebody is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.announcements import Registry
from services.common.errors import AntiphonError, Expired, Unavailable
from services.coordinator.clients import LearnerClient, RewardClient, RolloutClient, TenantClient

Client = RolloutClient | RewardClient | LearnerClient
AnyClient = TypeVar("AnyClient", RolloutClient, RewardClient, LearnerClient)
Kind: TypeAlias = events_pb2.WorkerKind
Life: TypeAlias = tuple[str, str]
"""(worker id, instance id): the same worker started again is another life."""

ROLLOUT, REWARD, LEARNER = events_pb2.WORKER_KIND_ROLLOUT, events_pb2.WORKER_KIND_REWARD, events_pb2.WORKER_KIND_LEARNER
_CLIENTS: dict[Kind, Any] = {ROLLOUT: RolloutClient, REWARD: RewardClient, LEARNER: LearnerClient}
_NAMES = {ROLLOUT: "rollout", REWARD: "reward", LEARNER: "learner"}
# An engine is up when it waits for its first policy.
_UP = frozenset(
    {
        tenant_pb2.WORKER_STATE_READY,
        tenant_pb2.WORKER_STATE_STALE,
        tenant_pb2.WORKER_STATE_UPDATING,
        tenant_pb2.WORKER_STATE_ASLEEP,
    }
)


class _Read(NamedTuple):
    """Announcements, and a client of each that was wanted."""

    heard: Sequence[events_pb2.WorkerAnnouncement]
    clients: Sequence[Client]


# Between two looks while somebody is waited for.
ASK_AGAIN_SECONDS = 1.0
NEWCOMER_SECONDS = 3600.0


class Workers:
    """Who is there. `expected` is how many of each kind the run starts with; `replacement_seconds` is how long one
    that died may be waited for, 0: nobody is replaced.
    """

    def __init__(self, registry: Registry, expected: dict[Kind, int], replacement_seconds: float = 0.0) -> None:
        self._registry = registry
        self._expected = expected
        self.replacement_seconds = replacement_seconds
        self._clients: dict[Life, Client] = {}
        self._seen: dict[Life, events_pb2.WorkerAnnouncement] = {}
        self._last: dict[Kind, list[Client]] = {}
        # To read hundreds of announcements for each call would add up.
        self._read: dict[tuple[Kind, frozenset[int] | None], _Read] = {}
        # Engines that serve a verified policy; set by publication.
        self.routing: set[Life] = set()

    async def wait_until_up(
        self, deadline_seconds: float, on_wait: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        """Returns when every expected worker has said that it is up.

        Raises Unavailable at once when one says that it failed, or is not heard of any more and is not replaced;
        Expired at the deadline.
        """

        async def tell() -> None:
            if on_wait is not None:
                await on_wait(self.missing())

        if not await self._registry.wait_for(self._all_up, deadline_seconds, tell):
            raise Expired(f"workers: not all up after {deadline_seconds:.0f} s; waiting for {self.missing()}")

    def missing(self) -> str:
        """What is waited for, in words."""
        parts = []
        for kind, expected in self._expected.items():
            alive = self._registry.alive(kind)
            parts += [f"{a.worker_id} ({_state(a)})" for a in alive if a.state not in _UP]
            if len(alive) < expected:
                parts.append(f"{expected - len(alive)} {_NAMES[kind]} worker(s) not heard of")
        return ", ".join(parts) or "nobody"

    def rollouts(self) -> list[RolloutClient]:
        """All engines, in routing or not."""
        return self._all(ROLLOUT, RolloutClient)

    def serving(self) -> list[RolloutClient]:
        """Engines that serve a verified policy."""
        return [client for client in self.rollouts() if self.serves(client)]

    def serves(self, engine: RolloutClient) -> bool:
        return life_of(engine) in self.routing

    def serve(self, engines: Sequence[RolloutClient]) -> None:
        """They hold the published policy, verified: requests may go to them."""
        self.routing |= {life_of(engine) for engine in engines}
        self._registry.look_again()

    async def wait_serving(self, seconds: float) -> list[RolloutClient]:
        """Engines that serve a verified policy, waited for. Raises Unavailable when there is none after so long."""
        if not await self._registry.wait_for(lambda: bool(self.serving()), seconds):
            known = ", ".join(client.worker_id for client in self.rollouts()) or "none"
            raise Unavailable(f"no engine serves the policy after {seconds:.0f} s; known: {known}")
        return self.serving()

    async def wait_for_newcomer(self) -> None:
        """Returns when an engine is up that serves no verified policy."""
        while not any(not self.serves(engine) for engine in self.rollouts()):
            await self._registry.wait_for(lambda: any(not self.serves(e) for e in self.rollouts()), NEWCOMER_SECONDS)

    def clients(self, kind: Kind) -> list[Client]:
        """All of a kind that are up, or the last that were."""
        found: list[Client] = self._all(kind, _CLIENTS[kind])
        return found

    async def answering_now(self, kind: Kind) -> list[Any]:
        """Those of a kind that answer a short call and are up by what they say."""
        clients = self.clients(kind)
        answers = await asyncio.gather(*(_is_up(client) for client in clients))
        return [client for client, up in zip(clients, answers, strict=True) if up]

    async def answering(self, kind: Kind, seconds: float) -> list[Any]:
        """The same, waited for until there is one. Raises Unavailable when there is none after so long."""
        end = time.monotonic() + seconds
        while not (found := await self.answering_now(kind)):
            left = end - time.monotonic()
            if left <= 0.0:
                known = ", ".join(client.worker_id for client in self.clients(kind)) or "none"
                raise Unavailable(f"no {_NAMES[kind]} worker answers after {seconds:.0f} s; known: {known}")
            await self._registry.wait_for(self._changed(kind), min(left, ASK_AGAIN_SECONDS))
        return found

    def _changed(self, kind: Kind) -> Callable[[], bool]:
        """Whether there are other lives of this kind than now."""
        lives = {life_of(client) for client in self.clients(kind)}
        return lambda: {life_of(client) for client in self.clients(kind)} != lives

    def rewards(self) -> list[RewardClient]:
        return self._all(REWARD, RewardClient)

    def learner(self) -> LearnerClient:
        """Raises Unavailable unless there is exactly one."""
        found = self._all(LEARNER, LearnerClient)
        if len(found) != 1:
            names = ", ".join(client.worker_id for client in found) or "none"
            raise Unavailable(f"learner: expected one worker, found {names}")
        return found[0]

    def tenants(self) -> list[LearnerClient | RolloutClient]:
        """Everybody who may share GPUs, up or not: a worker waits for a grant before it loads its model."""
        return [*self._known(LEARNER, LearnerClient), *self._known(ROLLOUT, RolloutClient)]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _all(self, kind: Kind, make: type[AnyClient]) -> list[AnyClient]:
        clients = self._known(kind, make, _UP)
        if clients:
            self._last[kind] = list(clients)
        return clients or [client for client in self._last.get(kind, []) if isinstance(client, make)]

    def _known(self, kind: Kind, make: type[AnyClient], states: frozenset[int] | None = None) -> list[AnyClient]:
        """A client of each that announces itself, in any of these states."""
        alive = self._registry.alive(kind)
        known = self._read.get((kind, states))
        clients = known.clients if known is not None and known.heard == alive else self._clients_of(alive, make, states)
        self._read[kind, states] = _Read(alive, clients)
        return [client for client in clients if isinstance(client, make)]

    def _clients_of(
        self,
        announcements: Sequence[events_pb2.WorkerAnnouncement],
        make: type[AnyClient],
        states: frozenset[int] | None,
    ) -> list[AnyClient]:
        clients = []
        for announcement in announcements:
            if states is not None and announcement.state not in states:
                continue
            key = (announcement.worker_id, announcement.instance_id)
            client = self._clients.get(key)
            if not isinstance(client, make):
                client = self._clients[key] = make(*key, announcement.address)
            clients.append(client)
        return clients

    def _all_up(self) -> bool:
        alive = {(a.worker_id, a.instance_id): a for kind in self._expected for a in self._registry.alive(kind)}
        for key, last in self._seen.items():
            if key not in alive and not self.replacement_seconds:
                error = Unavailable(f"{last.worker_id}: was {_state(last)} and is not heard of any more")
                error.worker_id = last.worker_id
                raise error
        self._seen = alive
        for announcement in alive.values():
            leaving = announcement.state == tenant_pb2.WORKER_STATE_STOPPING and not self.replacement_seconds
            if leaving or announcement.state == tenant_pb2.WORKER_STATE_FAILED:
                error = Unavailable(f"{announcement.worker_id}: says it is {_state(announcement)}")
                error.worker_id = announcement.worker_id
                raise error
        up = [a.kind for a in alive.values() if a.state in _UP]
        return all(up.count(kind) >= expected for kind, expected in self._expected.items())


def life_of(client: TenantClient | RewardClient) -> Life:
    return client.worker_id, client.instance_id


async def _is_up(client: Client) -> bool:
    try:
        if isinstance(client, RewardClient):
            await client.list_scorers()
            return True
        return (await client.state()).state in _UP
    except AntiphonError:
        return False


def least_loaded(clients: Sequence[AnyClient], avoid: set[str]) -> AnyClient:
    """The client with the fewest calls under way, those to avoid last. Raises Unavailable when there is none."""
    if not clients:
        raise Unavailable("no worker of the kind that is needed is alive and in routing")
    return min(clients, key=lambda client: (client.worker_id in avoid, client.in_flight, client.worker_id))


def _state(announcement: events_pb2.WorkerAnnouncement) -> str:
    name: str = tenant_pb2.WorkerState.Name(announcement.state)
    return name.removeprefix("WORKER_STATE_").lower()
