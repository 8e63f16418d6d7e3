"""Hand-overs and how they go wrong, in simulated time (handoff_world.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from antiphon.events.v1 import handoff_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV as KV
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_OPTIMIZER as OPTIMIZER
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS as WEIGHTS

from services.common.errors import AntiphonError, Expired, InvalidRequest, Unavailable
from services.common.handoff_log import node_subject
from services.coordinator.handoff import Wish
from services.coordinator.handoff_view import StreamLost
from tests.unit.coordinator.handoff_world import CAPACITY, Coordinator, TenantCall, TenantProcess, World

A, BOTH = ("a",), ("a", "b")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.check()
    world.close()


def begin(world: World, phase: str, run: str = "red", nodes: tuple[str, ...] = A, seconds: float = 60.0) -> Coordinator:
    coordinator = world.coordinators[run]
    coordinator.start(phase, lambda: coordinator.give(phase, nodes, seconds))
    world.loop.settle()
    return coordinator


def give(world: World, phase: str, run: str = "red", nodes: tuple[str, ...] = A) -> None:
    coordinator = begin(world, phase, run, nodes)
    world.calm(200)
    assert coordinator.done[-1:] == [phase], coordinator.error


def release(world: World, run: str) -> None:
    coordinator = world.coordinators[run]
    coordinator.start("release", lambda: coordinator.handoff.release(deadline_seconds=60.0))
    world.loop.settle()
    world.calm(200)
    assert coordinator.done[-1] == "release", coordinator.error


def failure(world: World, coordinator: Coordinator, hold: str = "") -> AntiphonError:
    world.calm(300, hold)
    assert isinstance(coordinator.error, AntiphonError)
    return coordinator.error


def tenant(world: World, worker_id: str, run: str = "red") -> TenantProcess:
    return world.tenants[run, worker_id]


def wishing(world: World, wishes: Callable[[], list[Wish]], **options: object) -> Coordinator:
    coordinator = world.coordinators["red"]

    async def work() -> None:
        await coordinator.handoff.to(wishes(), deadline_seconds=60.0, **options)  # type: ignore[arg-type]

    coordinator.start("wish", work)
    world.loop.settle()
    return coordinator


def test_the_gpus_go_from_phase_to_phase_under_growing_tokens(world: World) -> None:
    sequences = []
    for phase, engine, learner in (
        ("generate", {WEIGHTS, KV}, set()),
        ("train", set(), {WEIGHTS, OPTIMIZER}),
        ("publish", {WEIGHTS}, {WEIGHTS, OPTIMIZER}),
        ("generate", {WEIGHTS, KV}, set()),
    ):
        give(world, phase, nodes=BOTH)
        for node in BOTH:
            assert tenant(world, f"engine-{node}").resident == engine
            assert tenant(world, f"learner-{node}").resident == learner
        sequences.append(max(holding.sequence for holding in world.server.state("a").holdings.values()))
    assert sequences == sorted(set(sequences))


def test_what_can_never_fit_is_refused_before_anything_is_touched(world: World) -> None:
    def wishes() -> list[Wish]:
        engine, learner = tenant(world, "engine-a"), tenant(world, "learner-a")
        return [
            Wish(TenantCall(world, engine), "a", {WEIGHTS: {"gpu-a": 20 << 30}, KV: {"gpu-a": 60 << 30}}),
            Wish(TenantCall(world, learner), "a", {OPTIMIZER: {"gpu-a": CAPACITY}, WEIGHTS: {"gpu-9": 1}}),
            Wish(TenantCall(world, learner), "a", {}),
        ]

    error = failure(world, wishing(world, wishes))
    assert isinstance(error, InvalidRequest)
    assert "a: gpu-a: 20.00 GiB that engine-a of run red is granted for WEIGHTS + 60.00 GiB" in str(error)
    assert "gpu-9 is no GPU of the node" in str(error)
    assert "learner-a of run red is wished for twice" in str(error)
    assert "has 0.00 GiB to grant" in str(error)
    assert world.server.messages == [] == world.ops


def test_a_hand_over_of_nothing_is_refused(world: World) -> None:
    error = failure(world, wishing(world, list))
    assert isinstance(error, InvalidRequest) and "release" in str(error)


def test_silence_is_not_death(world: World) -> None:
    give(world, "generate")
    error = failure(world, begin(world, "train", seconds=30.0), hold="Sleep")
    assert isinstance(error, Expired)
    assert "not done after 30 s; waiting for engine-a of run red to give up WEIGHTS, KV" in str(error)
    assert tenant(world, "engine-a").resident == {WEIGHTS, KV}
    assert tenant(world, "learner-a").resident == set()
    world.calm(50)  # the Sleep arrives after all; the next try ends well
    give(world, "train")


def test_a_holder_that_dies_is_as_good_as_one_that_sleeps(world: World) -> None:
    give(world, "generate")
    coordinator = begin(world, "train")
    world.calm(5, hold="Sleep")
    world.crash_tenant(tenant(world, "engine-a"))
    world.calm(200, hold="Sleep")
    assert coordinator.done == ["generate", "train"]


def test_a_worker_that_is_dead_is_not_given_anything(world: World) -> None:
    dead = tenant(world, "engine-a")
    world.crash_tenant(dead)
    world.calm(10)
    error = failure(world, begin(world, "generate"))
    assert isinstance(error, Unavailable) and error.worker_id == "engine-a"
    assert "engine-a has exited" in str(error)


def test_a_worker_that_dies_before_it_wakes_is_named(world: World) -> None:
    coordinator = begin(world, "generate")
    world.calm(10, hold="Wake")
    assert [op.kind for op in world.ops] == ["Wake"]
    world.crash_tenant(tenant(world, "engine-a"))
    error = failure(world, coordinator, hold="Wake")
    assert isinstance(error, Unavailable) and error.worker_id == "engine-a"
    assert "engine-a exited before it woke WEIGHTS, KV" in str(error)


def test_a_life_that_nobody_saw_end_is_waited_for(world: World) -> None:
    give(world, "generate")
    old = tenant(world, "engine-a")
    world.start_tenant("red", "engine-a", "a")  # its successor announced itself, the end of `old` was not attested
    error = failure(world, begin(world, "train", seconds=30.0))
    assert isinstance(error, Expired)
    assert "nobody knows how to call it, and its supervisor has not said that it ended" in str(error)
    world.tenants["red", "old"] = old  # for the invariants: it was never told to sleep


def test_runs_take_turns_in_the_order_of_their_claims(world: World) -> None:
    give(world, "generate", nodes=BOTH)
    blue = begin(world, "generate", "blue")
    world.calm(40)
    assert blue.busy and tenant(world, "engine-a", "blue").resident == set()
    red = world.coordinators["red"]
    waiting: list[list[str]] = []

    async def look() -> None:
        waiting.append(await red.handoff.waiting_runs(5.0))

    red.start("look", look)
    world.loop.settle()
    assert waiting == [["blue"]]
    release(world, "red")
    world.calm(100)
    assert blue.done == ["generate"]
    assert tenant(world, "engine-a", "blue").resident == {WEIGHTS, KV}
    late = failure(world, begin(world, "train", "red", seconds=20.0))
    assert isinstance(late, Expired) and "its turn after run blue (claim" in str(late)


def test_a_run_that_asks_for_more_nodes_waits_with_empty_hands(world: World) -> None:
    give(world, "generate", "red", ("a",))
    give(world, "generate", "blue", ("b",))
    red, blue = begin(world, "generate", "red", BOTH), begin(world, "generate", "blue", BOTH)
    for run, coordinator in (("red", red), ("blue", blue)):
        world.calm(60)
        if not coordinator.busy:
            release(world, run)
    world.calm(300)
    for run, coordinator in (("red", red), ("blue", blue)):
        if coordinator.done[-1] != "release":
            assert coordinator.done[-1] == "generate", coordinator.error
            release(world, run)
        world.calm(300)
    assert {"generate"} <= set(red.done) and {"generate"} <= set(blue.done)


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_coordinator_that_dies_is_succeeded_wherever_it_was(world: World, steps: int) -> None:
    give(world, "generate")
    begin(world, "train")
    world.calm(steps)
    world.crash_coordinator("red")
    give(world, "train")
    assert tenant(world, "learner-a").resident == {WEIGHTS, OPTIMIZER}
    world.calm(50)
    give(world, "generate")


def test_a_lost_stream_is_said_and_the_next_hand_over_begins_anew(world: World) -> None:
    give(world, "generate")
    world.lose_stream()
    error = failure(world, begin(world, "train"))
    assert isinstance(error, StreamLost) and "epoch epoch-1 became epoch-2" in str(error)
    give(world, "train")
    assert tenant(world, "engine-a").resident == set()
    assert tenant(world, "learner-a").resident == {WEIGHTS, OPTIMIZER}


def test_nats_that_is_away_is_waited_for(world: World) -> None:
    give(world, "generate")
    world.server.up = False
    coordinator = begin(world, "train")
    world.pass_time(10.0)
    assert coordinator.busy and tenant(world, "engine-a").resident == {WEIGHTS, KV}
    world.server.up = True
    world.calm(100)
    assert coordinator.done == ["generate", "train"]
    world.server.up = False
    late = begin(world, "generate", seconds=5.0)
    world.pass_time(6.0)
    assert isinstance(late.error, Expired) and "NATS is away" in str(late.error)


class Recording(TenantCall):
    """Remembers what it was asked for."""

    def __init__(self, world: World, process: TenantProcess) -> None:
        super().__init__(world, process)
        self.sleeps: list[tenant_pb2.SleepRequest] = []
        self.wakes: list[tenant_pb2.WakeRequest] = []
        self.took = 0

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse:
        self.sleeps.append(request)
        return await super().sleep(request, deadline_seconds)

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse:
        self.wakes.append(request)
        await super().wake(request, deadline_seconds)
        change = tenant_pb2.DeviceChange(uuid="gpu-a", free_bytes_before=self.took, free_bytes_after=0)
        return tenant_pb2.WakeResponse(devices=[change])


def test_what_the_tenants_are_asked_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    engine, learner = (Recording(world, tenant(world, name)) for name in ("engine-a", "learner-a"))
    coordinator = world.coordinators["red"]
    coordinator.handoff._tenants = lambda: [engine, learner]
    memory = {WEIGHTS: {"gpu-a": 20}, KV: {"gpu-a": 60}}
    wishing(world, lambda: [Wish(engine, "a", memory, wake=frozenset({WEIGHTS}))])
    world.calm(100)
    assert [list(request.tags) for request in engine.wakes] == [[WEIGHTS]], "KV is granted and woken by a commit"
    assert engine.wakes[0].deadline_seconds == pytest.approx(60.0)
    assert engine.wakes[0].token == world.server.state("a").token(engine_id := tenant(world, "engine-a").id)
    assert set(world.server.state("a").holdings[engine_id].memory) == {WEIGHTS, KV}

    learner.took = 200 << 20
    with caplog.at_level(logging.WARNING, "services.coordinator.handoff"):
        wishing(
            world, lambda: [Wish(learner, "a", {OPTIMIZER: {"gpu-a": 60}})], discard_weights=["engine-a"]
        )  # fmt: skip
        world.calm(100)
    (sleep,) = engine.sleeps
    assert (list(sleep.tags), sleep.discard_weights) == ([WEIGHTS, KV], True)
    assert "learner-a took 0.20 GiB on gpu-a, and was granted 0.00 GiB there (OPTIMIZER" in caplog.text


def test_memory_of_a_tag_that_only_a_newer_build_knows_is_waited_for_and_named(world: World) -> None:
    kept = handoff_pb2.Kept(
        tenant=handoff_pb2.Tenant(run_id="green", worker_id="newer-0", instance_id="life"),
        memory=[handoff_pb2.TagBytes(tag=99, gpus=[handoff_pb2.GpuBytes(gpu_uuid="gpu-a", bytes=CAPACITY)])],
    )
    entry = handoff_pb2.HandoffEntry(epoch=world.server.epoch, kept=kept)
    world.server.publish(node_subject("a"), entry.SerializeToString(), None)
    error = failure(world, begin(world, "generate", seconds=5.0))
    assert isinstance(error, Expired)
    assert "newer-0 of run green still holds for tag 99" in str(error)
