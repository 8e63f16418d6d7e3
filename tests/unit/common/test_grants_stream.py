"""The stream on a real nats-server: what is granted survives it, what is stale is refused, a lost stream is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from antiphon.events.v1 import handoff_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV as KV
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS as WEIGHTS
from antiphon.types.v1.grant_pb2 import GrantToken
from nats.js.api import StorageType, StreamConfig

from services.common import handoff_log, handoff_stream
from services.common.bus import Bus
from services.common.config import ServiceConfig
from services.common.errors import ConfigError, Conflict, Expired, Unavailable
from services.common.grants import ClaimsState, NodeState, TenantId, share_of
from services.common.handoff_log import CLAIMS_SUBJECT, Refused, SubjectLog, node_subject
from services.common.handoff_stream import STREAM, JetStreamStore
from services.common.tenancy import TenantGuard
from tests.contract.echo_service import until

NODE = "host-1.example"
ENGINE = TenantId("red", "rollout-0", "life-1")
MEMORY = {WEIGHTS: {"GPU-0": 6}, KV: {"GPU-0": 60}}


@pytest.fixture
async def bus(nats_server: Any) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_server.url, "test", nats_server.monitor_url)
    yield bus
    await bus.close()


async def node_log(bus: Bus) -> SubjectLog[NodeState]:
    return SubjectLog(await JetStreamStore.open(bus), node_subject(NODE), NodeState, NodeState.apply)


async def grant(log: SubjectLog[NodeState], state: NodeState | None = None, tenant: TenantId = ENGINE) -> int:
    state = state or await log.refresh()
    entry = handoff_pb2.HandoffEntry(grant=state.grant("red", 1, [share_of(tenant, MEMORY)]))
    return await log.append(entry, state)


def token_of(log: SubjectLog[NodeState]) -> GrantToken:
    token = log.state.token(ENGINE)
    assert token is not None
    return token


@contextlib.asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[TenantGuard]:
    service = ServiceConfig(
        run_id=ENGINE.run_id, worker_id=ENGINE.worker_id, instance_id=ENGINE.instance_id, node=NODE, shares_gpus=True,
        run_dir=Path("unused"), nats_url="unused",
    )  # fmt: skip
    guard = TenantGuard(service)
    task = asyncio.create_task(guard.run(bus))
    try:
        yield guard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# The stream


async def test_killing_nats_between_grants_loses_no_grant_and_no_token(bus: Bus, nats_server: Any) -> None:
    log = await node_log(bus)
    given: list[int] = []
    for life in range(2):
        given.append(await grant(log, tenant=ENGINE._replace(instance_id=f"life-{life}")))
        nats_server.kill()
        await until(lambda: not bus.connected)
        nats_server.start()
        await until(lambda: bus.connected, 10)
        state = await log.refresh()
        assert [holding.sequence for holding in state.holdings.values()] == given
        assert (await (await node_log(bus)).refresh()).holdings == state.holdings, "as somebody reads it who is new"
    assert given == sorted(set(given))


async def test_of_two_that_decide_on_the_same_state_one_wins(bus: Bus) -> None:
    one, other = await node_log(bus), await node_log(bus)
    for _ in range(5):
        state = await one.refresh()
        assert await other.refresh() == state
        outcomes = await asyncio.gather(grant(one, state), grant(other, state), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {int, Refused}
        (won,) = (outcome for outcome in outcomes if isinstance(outcome, int))
        assert (await one.refresh()).holdings[ENGINE].sequence == won


async def test_what_is_appended_while_nats_is_away_fails_at_once_and_is_not_stored_later(
    bus: Bus, nats_server: Any
) -> None:
    log = await node_log(bus)
    before = await log.refresh()
    nats_server.kill()
    await until(lambda: not bus.connected)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="stored nothing"):
        await grant(log, before)
    with pytest.raises(Unavailable):
        await log.refresh()
    assert time.monotonic() - began < 2.0  # not the seconds that an answer is waited for
    nats_server.start()
    await until(lambda: bus.connected, 10)
    assert await log.refresh() == before
    assert await grant(log, before) == before.sequence + 1


async def test_an_append_whose_answer_was_lost_is_found_again(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await node_log(bus)
    publish = bus.jetstream.publish

    async def answer_lost(*arguments: Any, **options: Any) -> None:
        await publish(*arguments, **options)
        raise nats.errors.TimeoutError

    async def lost(*arguments: Any, **options: Any) -> None:
        raise nats.errors.TimeoutError

    monkeypatch.setattr(bus.jetstream, "publish", answer_lost)
    sequence = await grant(log)
    assert (await log.refresh()).holdings[ENGINE].sequence == sequence
    assert (await bus.jetstream.stream_info(STREAM)).state.messages == 1
    monkeypatch.setattr(bus.jetstream, "publish", lost)
    with pytest.raises(Unavailable, match="did not say that it stored a grant"):
        await grant(log)
    assert (await bus.jetstream.stream_info(STREAM)).state.messages == 1


async def test_a_stream_with_other_settings_is_refused(bus: Bus) -> None:
    await bus.jetstream.add_stream(StreamConfig(name=STREAM, subjects=["handoff.>"], storage=StorageType.MEMORY))
    with pytest.raises(ConfigError, match=r"storage 'memory' instead of 'file'.*max_msgs_per_subject"):
        await JetStreamStore.open(bus)


async def test_many_may_open_the_stream_at_once_and_find_one_epoch(bus: Bus) -> None:
    stores = await asyncio.gather(*(JetStreamStore.open(bus) for _ in range(5)))
    assert len({await store.epoch() for store in stores}) == 1


async def test_who_waits_is_told_at_once_also_after_nats_was_away(bus: Bus, nats_server: Any) -> None:
    log, other = await node_log(bus), await node_log(bus)
    for outage in (False, True):
        sequence = (await other.refresh()).sequence
        if outage:
            nats_server.kill()
            await until(lambda: not bus.connected)
        waiting = asyncio.create_task(other.wait_for(lambda state, s=sequence: state.sequence > s))  # type: ignore[misc]
        await asyncio.sleep(0.1)
        if outage:
            nats_server.start()
            await until(lambda: bus.connected, 10)
            await asyncio.sleep(1.2)  # it reads again
        began = time.monotonic()
        sequence = await grant(log)
        assert (await asyncio.wait_for(waiting, 5)).sequence == sequence
        assert time.monotonic() - began < 0.5, "by being told, not by looking again"


async def test_what_somebody_else_puts_on_the_subject_is_passed_over(bus: Bus) -> None:
    log = await node_log(bus)
    await bus.jetstream.publish(node_subject(NODE), b"\xff\xff not an entry")
    assert await grant(log) == 2
    assert (await log.refresh()).holdings[ENGINE].sequence == 2


# What NATS discards


def fact(kind: str) -> handoff_pb2.HandoffEntry:
    """A fact that changes nothing."""
    other = ENGINE._replace(worker_id="nobody").message()
    entries = {
        "slept": handoff_pb2.HandoffEntry(slept=handoff_pb2.Slept(tenant=other)),
        "released": handoff_pb2.HandoffEntry(released=handoff_pb2.Released(run_id="nobody")),
    }
    return entries[kind]


@pytest.fixture
def keeps_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose subjects hold eight messages."""
    for module in (handoff_log, handoff_stream):
        monkeypatch.setattr(module, "MESSAGES_PER_SUBJECT", 8)


@pytest.mark.usefixtures("keeps_eight")
async def test_who_may_have_missed_a_grant_that_was_discarded_does_not_take_the_gpus_for_free(bus: Bus) -> None:
    knows, behind = await node_log(bus), await node_log(bus)
    assert (await behind.refresh()).holdings == {}
    await grant(knows)
    for _ in range(7):
        await knows.append(fact("slept"))
    assert ENGINE in (await knows.refresh()).holdings, "which read along"
    assert ENGINE in (await (await node_log(bus)).refresh()).holdings, "the grant is the oldest that is kept"
    await bus.jetstream.publish(node_subject(NODE), b"\xff\xff not an entry")
    new = await node_log(bus)
    for log in (behind, new, behind, new):
        with pytest.raises(Unavailable, match=r"have no Grant or Claim among them .* delete the stream handoff"):
            await log.refresh()
        assert log.state.holdings == {} and log.state.sequence == 0
        with pytest.raises(Refused):
            await grant(log, log.state)
    await grant(knows, await knows.refresh(), ENGINE._replace(worker_id="rollout-1"))
    for log in (knows, behind, new):
        assert {tenant.worker_id for tenant in (await log.refresh()).holdings} == {"rollout-0", "rollout-1"}


@pytest.mark.usefixtures("keeps_eight")
async def test_fewer_messages_than_are_kept_hide_nothing(bus: Bus) -> None:
    log = await node_log(bus)
    for _ in range(7):
        await log.append(fact("slept"))
    assert (await (await node_log(bus)).refresh()).holdings == {}
    for _ in range(5):  # whoever reads along misses nothing, however many there are
        await log.refresh()
        await log.append(fact("slept"))
    assert (await log.refresh()).holdings == {}


@pytest.mark.usefixtures("keeps_eight")
async def test_claims_that_may_have_been_discarded_are_not_taken_for_ended(bus: Bus) -> None:
    def claims_log() -> SubjectLog[ClaimsState]:
        return SubjectLog(store, CLAIMS_SUBJECT, ClaimsState, ClaimsState.apply)

    store = await JetStreamStore.open(bus)
    knows = claims_log()
    state = await knows.refresh()
    await knows.append(handoff_pb2.HandoffEntry(claim=state.claim("red", "life", [NODE])), state)
    assert (await knows.refresh()).of("red")
    for _ in range(8):
        await knows.append(fact("released"))
        state = await knows.refresh()
    with pytest.raises(Unavailable, match=r"handoff\.claims: its last 8 messages"):
        await claims_log().refresh()
    await knows.append(handoff_pb2.HandoffEntry(claim=state.claim("blue", "life", [NODE])), state)
    assert [claim.run_id for claim in (await claims_log().refresh()).claims] == ["red", "blue"]


@pytest.mark.usefixtures("keeps_eight")
async def test_a_stream_made_anew_ends_the_doubt(bus: Bus) -> None:
    log = await node_log(bus)
    for _ in range(9):
        await bus.jetstream.publish(node_subject(NODE), b"\xff\xff not an entry")
    with pytest.raises(Unavailable):
        await log.refresh()
    await bus.jetstream.delete_stream(STREAM)
    assert await grant(log) == 1
    assert ENGINE in (await log.refresh()).holdings


# The guard of a tenant on it


async def test_the_token_of_the_latest_grant_is_the_one_that_holds(bus: Bus) -> None:
    log = await node_log(bus)
    async with following(bus) as guard:
        with pytest.raises(Expired, match="no grant of WEIGHTS on"):
            await guard.granted([WEIGHTS], 0.2)
        waiting = asyncio.create_task(guard.granted([WEIGHTS, KV], 5))
        first = await grant(log)
        assert (await waiting).sequence == first
        await log.refresh()
        old = token_of(log)
        await guard.check(old, [WEIGHTS, KV])
        second = await grant(log)
        await log.refresh()
        await guard.check(token_of(log), [WEIGHTS])
        assert guard.token == token_of(log)
        with pytest.raises(Conflict, match=f"token {first} of epoch .* the latest grant of .* names it is {second}"):
            await guard.check(old, [WEIGHTS])
        with pytest.raises(Conflict, match="carries the token"):
            await guard.check(GrantToken())
        with pytest.raises(Conflict, match="does not allow OPTIMIZER: of what it gave, WEIGHTS, KV is left"):
            await guard.check(token_of(log), [3])


async def test_what_slept_is_said_and_not_taken_again(bus: Bus) -> None:
    log = await node_log(bus)
    await grant(log)
    async with following(bus) as guard:
        token = (await log.refresh()).token(ENGINE)
        assert token is not None
        await guard.granted([KV], 5)
        async with guard.moving(token, [WEIGHTS, KV]):
            await guard.woke(tenant_pb2.WakeResponse(), [WEIGHTS, KV])
        assert (await log.refresh()).holdings[ENGINE].awake == {WEIGHTS, KV}
        for _ in range(2):  # a repeated Sleep says nothing new
            async with guard.moving(token):
                await guard.slept(tenant_pb2.SleepResponse(), [KV])
        state = await log.refresh()
        assert set(state.holdings[ENGINE].memory) == {WEIGHTS}
        assert state.sequence == 3
        await guard.check(token, [WEIGHTS])
        with pytest.raises(Conflict, match="does not allow KV"):
            await guard.check(token, [KV])


async def test_work_goes_on_while_nats_is_away_and_waking_waits_for_it(bus: Bus, nats_server: Any) -> None:
    log = await node_log(bus)
    await grant(log)
    async with following(bus) as guard:
        await guard.granted([KV], 5)
        token = guard.token
        async with guard.moving(token, [WEIGHTS]):
            await guard.woke(tenant_pb2.WakeResponse(), [WEIGHTS])
        nats_server.kill()
        await until(lambda: not bus.connected)
        await guard.check(token, [WEIGHTS])
        with pytest.raises(Unavailable):
            await guard.check(token, [KV])
        with pytest.raises(Unavailable):
            await guard.slept(tenant_pb2.SleepResponse(), [WEIGHTS])
        with pytest.raises(Unavailable):
            await guard.check(token, [WEIGHTS])
        nats_server.start()

        async def said() -> bool:
            return set((await log.refresh()).holdings[ENGINE].memory) == {KV}

        await until(lambda: bus.connected, 10)
        await until(said)  # by itself, once NATS was back


async def test_a_lost_stream_voids_every_token_and_what_is_resident_counts_in_the_new_one(bus: Bus) -> None:
    log = await node_log(bus)
    await grant(log)
    async with following(bus) as guard:
        await guard.granted([KV], 5)
        old = guard.token
        async with guard.moving(old, [WEIGHTS]):
            await guard.woke(tenant_pb2.WakeResponse(), [WEIGHTS])
        await bus.jetstream.delete_stream(STREAM)

        async def kept() -> bool:
            state = await log.refresh()
            return state.epoch != old.epoch and ENGINE in state.holdings

        await until(kept)
        assert log.state.holdings[ENGINE].memory == {WEIGHTS: {"GPU-0": 6}}
        with pytest.raises(Conflict, match=f"epoch {old.epoch} is void"):
            await guard.check(old, [WEIGHTS])
        async with guard.moving(token_of(log)):
            await guard.slept(tenant_pb2.SleepResponse(), [WEIGHTS])
        assert not (await log.refresh()).holdings[ENGINE].memory


async def test_a_grant_for_a_stream_that_is_gone_is_void_in_the_next(bus: Bus) -> None:
    log, late = await node_log(bus), await node_log(bus)
    state = await late.refresh()
    await bus.jetstream.delete_stream(STREAM)
    await log.refresh()
    await grant(late, state)  # its subject is empty there too, so that it is stored
    assert (await log.refresh()).holdings == {} == (await late.refresh()).holdings
    assert log.state.sequence == 1


@pytest.mark.slow
async def test_a_frozen_server_leaves_the_outcome_open_and_the_grant_is_not_given_twice(
    bus: Bus, nats_server: Any
) -> None:
    log = await node_log(bus)
    state = await log.refresh()
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            await grant(log, state)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await until(lambda: bus.connected, 10)
    await asyncio.sleep(0.5)
    if (now := await log.refresh()).sequence == 0:
        await grant(log, now)
    else:  # stored after all, once
        assert now.sequence == 1
        with pytest.raises(Refused):
            await grant(log, state)
    assert (await log.refresh()).holdings[ENGINE].sequence == 1
