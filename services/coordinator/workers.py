"""The live workers of the run, by kind, as they announce themselves, each with a client.

Silence is not death: when nobody of a kind is heard of, the last ones known are still called, and the call itself shows
within seconds whether somebody is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.announcements import Registry
from services.common.errors import Expired, Unavailable
from services.coordinator.clients import LearnerClient, RewardClient, RolloutClient

Client = RolloutClient | RewardClient | LearnerClient
AnyClient = TypeVar("AnyClient", RolloutClient, RewardClient, LearnerClient)
Kind: TypeAlias = events_pb2.WorkerKind

ROLLOUT, REWARD, LEARNER = events_pb2.WORKER_KIND_ROLLOUT, events_pb2.WORKER_KIND_REWARD, events_pb2.WORKER_KIND_LEARNER
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


class Workers:
    """Who is there. `expected` is how many of each kind the run starts with."""

    def __init__(self, registry: Registry, expected: dict[Kind, int]) -> None:
        self._registry = registry
        self._expected = expected
        self._clients: dict[tuple[str, str], Client] = {}
        self._seen: dict[tuple[str, str], events_pb2.WorkerAnnouncement] = {}
        self._last: dict[Kind, list[Client]] = {}
        # To read hundreds of announcements for each call would add up.
        self._read: dict[tuple[Kind, frozenset[int] | None], _Read] = {}
        # Engines that serve a verified policy, by (worker id, instance id); set by publication.
        self.routing: set[tuple[str, str]] = set()

    async def wait_until_up(
        self, deadline_seconds: float, on_wait: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        """Returns when every expected worker has said that it is up.

        Raises Unavailable at once when one says that it failed, or is not heard of any more; Expired at the deadline.
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
        return [client for client in self.rollouts() if life_of(client) in self.routing]

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
            if key not in alive:
                error = Unavailable(f"{last.worker_id}: was {_state(last)} and is not heard of any more")
                error.worker_id = last.worker_id
                raise error
        self._seen = alive
        for announcement in alive.values():
            if announcement.state in (tenant_pb2.WORKER_STATE_FAILED, tenant_pb2.WORKER_STATE_STOPPING):
                error = Unavailable(f"{announcement.worker_id}: says it is {_state(announcement)}")
                error.worker_id = announcement.worker_id
                raise error
        up = [a.kind for a in alive.values() if a.state in _UP]
        return all(up.count(kind) >= expected for kind, expected in self._expected.items())


def life_of(client: Client) -> tuple[str, str]:
    """(worker id, instance id): the same worker started again is another life."""
    return client.worker_id, client.instance_id


def least_loaded(clients: Sequence[AnyClient], avoid: set[str]) -> AnyClient:
    """The client with the fewest calls under way, those to avoid last. Raises Unavailable when there is none."""
    if not clients:
        raise Unavailable("no worker of the kind that is needed is alive and in routing")
    return min(clients, key=lambda client: (client.worker_id in avoid, client.in_flight, client.worker_id))


def _state(announcement: events_pb2.WorkerAnnouncement) -> str:
    name: str = tenant_pb2.WorkerState.Name(announcement.state)
    return name.removeprefix("WORKER_STATE_").lower()
