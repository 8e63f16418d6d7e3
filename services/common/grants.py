"""Who may have memory resident on a node's GPUs: a pure fold over messages of the stream `handoff`, in its order.

No clock, no I/O: the same messages give the same answer to everybody (docs/design.md §7). A tenant holds memory from
the Grant that gave it until it has said Slept or its supervisor has said Exited, whether it ever woke it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from antiphon.events.v1 import handoff_pb2
from antiphon.types.v1 import grant_pb2

Tag: TypeAlias = grant_pb2.MemoryTag
# Tag → GPU uuid → bytes. On CPU a tag has no GPU.
Memory: TypeAlias = Mapping[Tag, Mapping[str, int]]

# Of tenants that exited the newest are remembered: long after its end nobody would grant one anything.
EXITED_KEPT = 256
_GIB = 2**30


class TenantId(NamedTuple):
    """One life of one worker."""

    run_id: str
    worker_id: str
    instance_id: str

    def __str__(self) -> str:
        return f"{self.worker_id} of run {self.run_id}"

    @classmethod
    def of(cls, tenant: handoff_pb2.Tenant) -> TenantId:
        return cls(tenant.run_id, tenant.worker_id, tenant.instance_id)

    def message(self) -> handoff_pb2.Tenant:
        return handoff_pb2.Tenant(run_id=self.run_id, worker_id=self.worker_id, instance_id=self.instance_id)


@dataclass(frozen=True)
class Holding:
    """What one tenant may have resident now."""

    sequence: int
    """Of the message that gave it: the tenant's token."""
    memory: Memory
    awake: frozenset[Tag] = frozenset()
    """Tags of it that the tenant said it woke, under this sequence."""


@dataclass(frozen=True)
class NodeState:
    """What is true of a node after message `sequence` of its subject. Example: learner-0 holds OPTIMIZER since 41."""

    epoch: str = ""
    sequence: int = 0
    holdings: Mapping[TenantId, Holding] = field(default_factory=dict)
    exited: tuple[TenantId, ...] = ()
    """Newest last."""

    def apply(self, sequence: int, entry: handoff_pb2.HandoffEntry) -> NodeState:
        """The state after one more message; one that it has already, or that is of another epoch, adds nothing."""
        if sequence <= self.sequence:
            return self
        state = replace(self, sequence=sequence)
        if entry.epoch != self.epoch:
            return state
        if entry.HasField("grant"):
            state = state._granted(entry.grant)
        elif entry.HasField("slept"):
            state = state._slept(entry.slept)
        elif entry.HasField("woke"):
            state = state._woke(entry.woke)
        elif entry.HasField("kept"):
            state = state._kept(entry.kept)
        elif entry.HasField("exited"):
            state = state._exited(TenantId.of(entry.exited.tenant))
        return state

    def says_all(self, entry: handoff_pb2.HandoffEntry) -> bool:
        """Whether what is true after the message is in it, whatever came before: the fold may begin there."""
        return entry.epoch == self.epoch and entry.HasField("grant")

    def token(self, tenant: TenantId) -> grant_pb2.GrantToken | None:
        """The token that a tenant acts under; None when nothing names it."""
        holding = self.holdings.get(tenant)
        return None if holding is None else grant_pb2.GrantToken(epoch=self.epoch, sequence=holding.sequence)

    def may_append(
        self, grant: handoff_pb2.Grant, capacity: Mapping[str, int], claims: ClaimsState, node: str
    ) -> list[str]:
        """What forbids to append the grant right after this state, in words; empty when nothing does.

        `capacity` is GPU uuid → bytes that may be granted there.
        """
        problems = []
        if (own := claims.of(grant.run_id)) is None or own.position != grant.claim:
            problems.append(f"run {grant.run_id} has no open claim {grant.claim}")
        elif ahead := claims.ahead(own, [node]):
            problems.append(f"it is not the turn of run {grant.run_id} on {node}: before it {_listed(ahead)}")
        for share in grant.shares:
            tenant, memory = TenantId.of(share.tenant), memory_of(share.memory)
            if tenant in self.exited:
                problems.append(f"{tenant} has exited")
            held = self.holdings[tenant].memory if tenant in self.holdings else {}
            problems += [
                f"{tenant} still holds {described(tag, held[tag])} and would be granted less: it sleeps first"
                for tag in held
                if tag not in memory or any(memory[tag].get(gpu, 0) < size for gpu, size in held[tag].items())
            ]
        if list(grant.earlier) != self.earlier(grant.shares):
            problems.append("the grant does not carry what others still hold")
        return problems + overfull(grant, capacity)

    def earlier(self, shares: Iterable[handoff_pb2.Share]) -> list[handoff_pb2.Share]:
        """What those hold whom the shares do not name: a Grant carries it."""
        named = {TenantId.of(share.tenant) for share in shares}
        return [
            share_of(tenant, holding.memory, holding.sequence)
            for tenant, holding in sorted(self.holdings.items())
            if tenant not in named and holding.memory
        ]

    def grant(self, run_id: str, claim: int, shares: Sequence[handoff_pb2.Share]) -> handoff_pb2.Grant:
        """The grant of these shares as it may follow this state."""
        return handoff_pb2.Grant(
            run_id=run_id,
            claim=claim,
            shares=shares,
            earlier=self.earlier(shares),
            exited=[tenant.message() for tenant in self.exited],
        )

    def _granted(self, grant: handoff_pb2.Grant) -> NodeState:
        holdings = {TenantId.of(s.tenant): Holding(s.sequence, memory_of(s.memory)) for s in grant.earlier}
        for tenant in holdings.keys() & self.holdings.keys():
            holdings[tenant] = replace(holdings[tenant], awake=self.holdings[tenant].awake)
        for share in grant.shares:
            holdings[TenantId.of(share.tenant)] = Holding(self.sequence, memory_of(share.memory))
        return replace(self, holdings=holdings, exited=tuple(TenantId.of(tenant) for tenant in grant.exited))

    def _slept(self, slept: handoff_pb2.Slept) -> NodeState:
        tenant = TenantId.of(slept.tenant)
        holding = self.holdings.get(tenant)
        if holding is None or holding.sequence != slept.sequence:
            return self
        left = {tag: gpus for tag, gpus in holding.memory.items() if tag not in slept.tags}
        # Named still, by a Grant that is the latest: a repeated Sleep under its token is no Conflict.
        return self._with(tenant, Holding(holding.sequence, left, holding.awake - set(slept.tags)))

    def _woke(self, woke: handoff_pb2.Woke) -> NodeState:
        tenant = TenantId.of(woke.tenant)
        holding = self.holdings.get(tenant)
        if holding is None or holding.sequence != woke.sequence:
            return self
        return self._with(tenant, replace(holding, awake=holding.awake | (set(woke.tags) & holding.memory.keys())))

    def _kept(self, kept: handoff_pb2.Kept) -> NodeState:
        tenant = TenantId.of(kept.tenant)
        if tenant in self.exited:
            return self
        memory = memory_of(kept.memory)
        known = self.holdings.get(tenant)
        if known is None:
            return self._with(tenant, Holding(self.sequence, memory, frozenset(memory)))
        # Somebody granted it something before it could say this: what it holds counts all the same.
        return self._with(tenant, replace(known, memory={**memory, **known.memory}))

    def _exited(self, tenant: TenantId) -> NodeState:
        if tenant in self.exited:
            return self
        left = {other: holding for other, holding in self.holdings.items() if other != tenant}
        return replace(self, holdings=left, exited=(*self.exited, tenant)[-EXITED_KEPT:])

    def _with(self, tenant: TenantId, holding: Holding) -> NodeState:
        return replace(self, holdings={**self.holdings, tenant: holding})


def overfull(grant: handoff_pb2.Grant, capacity: Mapping[str, int]) -> list[str]:
    """The equation of each GPU whose sum does not fit."""
    terms: dict[str, list[tuple[int, str]]] = {}
    for verb, shares in (("is granted", grant.shares), ("still holds", grant.earlier)):
        for share in shares:
            for tag, gpus in memory_of(share.memory).items():
                for gpu, size in gpus.items():
                    words = f"{gib(size)} that {TenantId.of(share.tenant)} {verb} for {tag_name(tag)}"
                    terms.setdefault(gpu, []).append((size, words))
    problems = []
    for gpu, parts in sorted(terms.items()):
        total = sum(max(size, 0) for size, _ in parts)  # nobody gives bytes by holding fewer than none
        if gpu not in capacity:
            problems.append(f"{gpu} is no GPU of the node: it has {', '.join(sorted(capacity)) or 'none'}")
        elif total > capacity[gpu]:
            equation = " + ".join(words for _, words in parts)
            problems.append(f"{gpu}: {equation} = {gib(total)}, and it has {gib(capacity[gpu])} to grant")
    return problems


class OpenClaim(NamedTuple):
    """A run's claim to nodes that has not ended. Its position is its place in the order, the same on every node."""

    position: int
    run_id: str
    instance_id: str
    nodes: frozenset[str]

    def __str__(self) -> str:
        return f"run {self.run_id} (claim {self.position} to {', '.join(sorted(self.nodes))})"

    @classmethod
    def of(cls, claim: handoff_pb2.OpenClaim) -> OpenClaim:
        return cls(claim.position, claim.run_id, claim.instance_id, frozenset(claim.nodes))

    def message(self) -> handoff_pb2.OpenClaim:
        return handoff_pb2.OpenClaim(
            position=self.position, run_id=self.run_id, instance_id=self.instance_id, nodes=sorted(self.nodes)
        )


@dataclass(frozen=True)
class ClaimsState:
    """The open claims after the message `sequence` of their subject, oldest first."""

    epoch: str = ""
    sequence: int = 0
    claims: tuple[OpenClaim, ...] = ()

    def apply(self, sequence: int, entry: handoff_pb2.HandoffEntry) -> ClaimsState:
        """As NodeState.apply."""
        if sequence <= self.sequence:
            return self
        state = replace(self, sequence=sequence)
        if entry.epoch != self.epoch:
            return state
        match entry.WhichOneof("entry"):
            case "claim":
                own = OpenClaim.of(entry.claim.own)
                own = own._replace(position=own.position or sequence)
                claims = [own, *(OpenClaim.of(claim) for claim in entry.claim.earlier)]
                return replace(state, claims=tuple(sorted(claims)))
            case "released":
                ended = (entry.released.run_id, entry.released.position)
                return state._without([c for c in self.claims if (c.run_id, c.position) == ended])
            case "exited":
                exited = TenantId.of(entry.exited.tenant)
                gone = [c for c in self.claims if (c.run_id, c.instance_id) == (exited.run_id, exited.instance_id)]
                return state._without(gone)
            case _:
                return state

    def says_all(self, entry: handoff_pb2.HandoffEntry) -> bool:
        """As NodeState.says_all."""
        return entry.epoch == self.epoch and entry.HasField("claim")

    def of(self, run_id: str) -> OpenClaim | None:
        """The run's open claim."""
        return next((claim for claim in self.claims if claim.run_id == run_id), None)

    def ahead(self, own: OpenClaim, nodes: Iterable[str]) -> list[OpenClaim]:
        """The older claims to any of these nodes."""
        return [c for c in self.claims if c.position < own.position and not c.nodes.isdisjoint(nodes)]

    def behind(self, own: OpenClaim) -> list[OpenClaim]:
        """The younger claims that wait for any node of this one."""
        return [c for c in self.claims if c.position > own.position and not c.nodes.isdisjoint(own.nodes)]

    def claim(self, run_id: str, instance_id: str, nodes: Iterable[str]) -> handoff_pb2.Claim:
        """The Claim as it may follow this state. Other nodes than before cost the run its place: otherwise two runs
        that each hold a node and want the other's would wait for ever."""
        known = self.of(run_id)
        own = OpenClaim(0, run_id, instance_id, frozenset(nodes))
        if known is not None and known.nodes == own.nodes:
            own = own._replace(position=known.position)
        others = [claim.message() for claim in self.claims if claim.run_id != run_id]
        return handoff_pb2.Claim(own=own.message(), earlier=others)

    def _without(self, ended: Iterable[OpenClaim]) -> ClaimsState:
        gone = set(ended)
        return replace(self, claims=tuple(claim for claim in self.claims if claim not in gone))


def memory_of(parts: Iterable[handoff_pb2.TagBytes]) -> dict[Tag, dict[str, int]]:
    return {part.tag: {gpu.gpu_uuid: gpu.bytes for gpu in part.gpus} for part in parts}


def memory_message(memory: Memory) -> list[handoff_pb2.TagBytes]:
    return [
        handoff_pb2.TagBytes(
            tag=tag, gpus=[handoff_pb2.GpuBytes(gpu_uuid=gpu, bytes=size) for gpu, size in sorted(memory[tag].items())]
        )
        for tag in sorted(memory)
    ]


def share_of(tenant: TenantId, memory: Memory, sequence: int = 0) -> handoff_pb2.Share:
    return handoff_pb2.Share(tenant=tenant.message(), memory=memory_message(memory), sequence=sequence)


def described(tag: Tag, gpus: Mapping[str, int]) -> str:
    """For messages: 'KV (40.00 GiB on GPU-1)'."""
    where = ", ".join(f"{gib(size)} on {gpu}" for gpu, size in sorted(gpus.items()))
    return f"{tag_name(tag)} ({where})" if where else tag_name(tag)


def tag_name(tag: Tag) -> str:
    """Its number where only a newer build has a name for it: what is held counts all the same."""
    if tag not in grant_pb2.MemoryTag.values():
        return f"tag {tag}"
    name: str = grant_pb2.MemoryTag.Name(tag)
    return name.removeprefix("MEMORY_TAG_")


def gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _listed(claims: Iterable[OpenClaim]) -> str:
    return ", ".join(str(claim) for claim in claims)
