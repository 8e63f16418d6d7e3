"""The fold over a node's subject, and over the claims, by hand-counted stories."""

from __future__ import annotations

from collections.abc import Iterable

from antiphon.events.v1 import handoff_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV as KV
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_OPTIMIZER as OPTIMIZER
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS as WEIGHTS

from services.common.grants import EXITED_KEPT, ClaimsState, NodeState, OpenClaim, TenantId, memory_message, share_of

GIB = 2**30
GPU = {"GPU-0": 100 * GIB}
ENGINE = TenantId("red", "rollout-0", "life-1")
LEARNER = TenantId("red", "learner-0", "life-2")
CLAIMED = ClaimsState("e", 1, (OpenClaim(1, "red", "life-0", frozenset({"n"})),))


def gib(**tags: int) -> dict[int, dict[str, int]]:
    names = {"weights": WEIGHTS, "kv": KV, "optimizer": OPTIMIZER}
    return {names[tag]: {"GPU-0": size * GIB} for tag, size in tags.items()}


def entry(epoch: str = "e", **kind: object) -> handoff_pb2.HandoffEntry:
    return handoff_pb2.HandoffEntry(epoch=epoch, **kind)  # type: ignore[arg-type]


def granted(state: NodeState, sequence: int, *shares: handoff_pb2.Share) -> NodeState:
    grant = state.grant("red", 1, shares)
    assert state.may_append(grant, GPU, CLAIMED, "n") == []
    return state.apply(sequence, entry(grant=grant))


def slept(tenant: TenantId, sequence: int, *tags: int) -> handoff_pb2.HandoffEntry:
    return entry(slept=handoff_pb2.Slept(tenant=tenant.message(), sequence=sequence, tags=tags))


def exited(tenant: TenantId) -> handoff_pb2.HandoffEntry:
    return entry(exited=handoff_pb2.Exited(tenant=tenant.message(), pid=1))


def has(state: NodeState) -> dict[str, tuple[int, list[int]]]:
    return {t.worker_id: (h.sequence, sorted(h.memory)) for t, h in state.holdings.items()}


def engine_granted() -> NodeState:
    return granted(NodeState("e"), 7, share_of(ENGINE, gib(weights=6, kv=60)))


def test_a_grant_is_held_until_its_tenant_slept() -> None:
    state = engine_granted()
    token = state.token(ENGINE)
    assert token is not None and (token.epoch, token.sequence) == ("e", 7)
    assert state.token(LEARNER) is None
    state = state.apply(8, slept(ENGINE, 7, KV))
    assert has(state) == {"rollout-0": (7, [WEIGHTS])}
    state = state.apply(9, slept(ENGINE, 7, WEIGHTS))
    assert has(state) == {"rollout-0": (7, [])}, "named still: a repeated Sleep is no Conflict"
    state = granted(state, 10, share_of(LEARNER, gib(weights=6, optimizer=90)))
    assert has(state) == {"learner-0": (10, [WEIGHTS, OPTIMIZER])}


def test_what_does_not_fit_is_refused_with_the_equation() -> None:
    state = engine_granted()
    grant = state.grant("red", 1, [share_of(LEARNER, gib(weights=6, optimizer=60))])
    (problem,) = state.may_append(grant, GPU, CLAIMED, "n")
    assert problem == (
        "GPU-0: 6.00 GiB that learner-0 of run red is granted for WEIGHTS + 60.00 GiB that learner-0 of run red is "
        "granted for OPTIMIZER + 6.00 GiB that rollout-0 of run red still holds for WEIGHTS + 60.00 GiB that rollout-0 "
        "of run red still holds for KV = 132.00 GiB, and it has 100.00 GiB to grant"
    )
    state = state.apply(8, slept(ENGINE, 7, KV))
    grant = state.grant("red", 1, [share_of(LEARNER, gib(weights=6, optimizer=60))])
    assert state.may_append(grant, GPU, CLAIMED, "n") == []
    (problem,) = state.may_append(grant, {"GPU-1": GIB}, CLAIMED, "n")
    assert problem == "GPU-0 is no GPU of the node: it has GPU-1"


def test_a_tenant_is_not_granted_less_than_it_holds() -> None:
    state = engine_granted()
    for less in (gib(weights=6), gib(weights=6, kv=59), {}):
        grant = state.grant("red", 1, [share_of(ENGINE, less)])
        assert "sleeps first" in state.may_append(grant, GPU, CLAIMED, "n")[0]
    state = granted(state, 8, share_of(ENGINE, gib(weights=7, kv=60, optimizer=1)))
    assert has(state) == {"rollout-0": (8, [WEIGHTS, KV, OPTIMIZER])}


def test_word_of_another_grant_frees_nothing() -> None:
    state = granted(engine_granted(), 8, share_of(ENGINE, gib(weights=6, kv=60)))
    assert has(state.apply(9, slept(ENGINE, 7, KV))) == {"rollout-0": (8, [WEIGHTS, KV])}


def test_a_message_counts_once_and_in_its_epoch_only() -> None:
    state = engine_granted()
    assert state.apply(7, slept(ENGINE, 7, KV)) is state
    other = entry("old", exited=handoff_pb2.Exited(tenant=ENGINE.message()))
    assert state.apply(8, other) == NodeState("e", 8, state.holdings)


def test_an_exit_frees_everything_and_for_good() -> None:
    state = engine_granted().apply(8, exited(ENGINE))
    assert has(state) == {}
    grant = state.grant("red", 1, [share_of(ENGINE, gib(kv=1))])
    assert state.may_append(grant, GPU, CLAIMED, "n") == ["rollout-0 of run red has exited"]
    state = granted(state, 9, share_of(LEARNER, gib(weights=1)))
    assert state.exited == (ENGINE,), "the next grant carries it"
    kept = entry(kept=handoff_pb2.Kept(tenant=ENGINE.message(), memory=memory_message(gib(kv=1))))
    assert has(state.apply(10, kept)) == has(state), "said before it died, stored after"
    for number in range(EXITED_KEPT + 5):
        state = state.apply(20 + number, exited(ENGINE._replace(instance_id=f"life-{number}")))
    assert len(state.exited) == EXITED_KEPT and state.exited[-1].instance_id == f"life-{EXITED_KEPT + 4}"


def test_another_life_of_a_worker_is_another_tenant() -> None:
    state = engine_granted().apply(8, exited(ENGINE._replace(instance_id="life-9")))
    assert has(state) == {"rollout-0": (7, [WEIGHTS, KV])}


def test_the_fold_may_begin_at_any_grant() -> None:
    state = engine_granted().apply(8, slept(ENGINE, 7, KV))
    grant = state.grant("red", 1, [share_of(LEARNER, gib(weights=6))])
    full, late = state.apply(9, entry(grant=grant)), NodeState("e").apply(9, entry(grant=grant))
    assert has(full) == has(late) == {"rollout-0": (7, [WEIGHTS]), "learner-0": (9, [WEIGHTS])}
    forgetful = handoff_pb2.Grant(run_id="red", claim=1, shares=[share_of(LEARNER, gib(weights=6))])
    assert "does not carry what others still hold" in state.may_append(forgetful, GPU, CLAIMED, "n")[0]


def test_what_a_tenant_kept_over_a_lost_stream_counts() -> None:
    kept = entry(kept=handoff_pb2.Kept(tenant=ENGINE.message(), memory=memory_message(gib(weights=6, kv=60))))
    state = NodeState("e").apply(3, kept)
    assert has(state) == {"rollout-0": (3, [WEIGHTS, KV])}
    assert has(state.apply(4, slept(ENGINE, 3, WEIGHTS, KV))) == {"rollout-0": (3, [])}
    state = granted(NodeState("e"), 2, share_of(ENGINE, gib(weights=7)))
    assert has(state.apply(3, kept)) == {"rollout-0": (2, [WEIGHTS, KV])}, "granted something before it could say so"


def claims(*open_: tuple[int, str, str]) -> ClaimsState:
    """Each: position, run, its nodes."""
    return ClaimsState("e", 9, tuple(OpenClaim(p, run, f"{run}-1", frozenset(nodes)) for p, run, nodes in open_))


def names(found: Iterable[OpenClaim]) -> list[str]:
    return [claim.run_id for claim in found]


def test_the_oldest_claim_has_the_node() -> None:
    state = claims((1, "red", "a"), (2, "blue", "ab"), (3, "green", "b"))
    red, blue, green = state.claims
    assert names(state.ahead(red, "a")) == []
    assert names(state.ahead(blue, "ab")) == ["red"] and names(state.ahead(blue, "b")) == []
    assert names(state.ahead(green, "b")) == ["blue"]
    assert names(state.behind(red)) == ["blue"] and names(state.behind(blue)) == ["green"]
    node = NodeState("e")
    assert node.may_append(node.grant("blue", 2, []), GPU, state, "a") == [
        "it is not the turn of run blue on a: before it run red (claim 1 to a)"
    ]
    assert node.may_append(node.grant("blue", 2, []), GPU, state, "b") == []
    assert node.may_append(node.grant("grey", 5, []), GPU, state, "b") == ["run grey has no open claim 5"]


def test_a_claim_begins_ends_and_keeps_its_place() -> None:
    state = ClaimsState("e")
    for sequence, run, nodes in ((4, "red", "ab"), (5, "blue", "a")):
        state = state.apply(sequence, entry(claim=state.claim(run, f"{run}-1", nodes)))
    assert [(c.position, c.run_id) for c in state.claims] == [(4, "red"), (5, "blue")]
    again = state.apply(6, entry(claim=state.claim("red", "red-2", "ab")))
    assert [(c.position, c.instance_id) for c in again.claims] == [(4, "red-2"), (5, "blue-1")]
    late = again.apply(7, exited(TenantId("red", "coordinator-0", "red-1")))
    assert names(late.claims) == ["red", "blue"], "the word of its predecessor's end"
    more = late.apply(8, entry(claim=late.claim("red", "red-2", "abc")))
    assert [(c.position, c.run_id) for c in more.claims] == [(5, "blue"), (8, "red")], "more nodes cost the place"
    assert more.apply(9, entry(released=handoff_pb2.Released(run_id="red", position=4))).claims == more.claims
    gone = more.apply(9, entry(released=handoff_pb2.Released(run_id="red", position=8)))
    assert names(gone.claims) == ["blue"]
    assert gone.apply(10, exited(TenantId("blue", "coordinator-0", "blue-1"))).claims == ()


def test_the_claims_fold_may_begin_at_any_claim() -> None:
    state = claims((1, "red", "a"), (2, "blue", "a"))
    claim = entry(claim=state.claim("green", "green-1", "a"))
    assert ClaimsState("e").apply(10, claim).claims == state.apply(10, claim).claims


def test_a_tag_that_only_a_newer_build_knows_counts_and_is_shown_by_its_number() -> None:
    state = NodeState("e")
    newer = {99: {"GPU-0": 60 * GIB}}
    state = state.apply(7, entry(kept=handoff_pb2.Kept(tenant=ENGINE.message(), memory=memory_message(newer))))
    assert has(state) == {"rollout-0": (7, [99])}
    grant = state.grant("red", 1, [share_of(LEARNER, gib(optimizer=60))])
    (problem,) = state.may_append(grant, GPU, CLAIMED, "n")
    assert "60.00 GiB that rollout-0 of run red still holds for tag 99 = 120.00 GiB" in problem
    (problem,) = state.may_append(state.grant("red", 1, [share_of(ENGINE, {})]), GPU, CLAIMED, "n")
    assert "still holds tag 99 (60.00 GiB on GPU-0)" in problem
    state = granted(state, 8, share_of(LEARNER, gib(optimizer=40)))
    assert has(NodeState("e").apply(8, entry(grant=grant))) == {"rollout-0": (7, [99]), "learner-0": (8, [OPTIMIZER])}
    state = state.apply(9, entry(woke=handoff_pb2.Woke(tenant=ENGINE.message(), sequence=7, tags=[99, -5])))
    state = state.apply(10, slept(ENGINE, 7, -5, 99, 2**31 - 1))
    assert has(state) == {"rollout-0": (7, []), "learner-0": (8, [OPTIMIZER])}
