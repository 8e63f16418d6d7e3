"""The protocol of grants under crashes, restarts and lost messages in any order, against what is really resident."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.common.grants import NodeState
from tests.unit.coordinator.handoff_world import NODES, PHASES, RUNS, World

# Deliveries that must be enough for both runs to get through everything once the faults stop.
STEPS = 3000
anything = st.integers(0, 10_000)


class Protocol(RuleBasedStateMachine):
    """Two runs over two nodes."""

    mutant = ""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.mutant)
        self.may_lose = False

    @initialize(may_lose=st.sampled_from((False, False, True)))
    def begin(self, may_lose: bool) -> None:
        self.may_lose = may_lose

    @rule(run=st.sampled_from(RUNS), what=st.sampled_from((*PHASES, "release")),
          nodes=st.sampled_from((NODES[:1], NODES[1:], NODES)), steps=st.integers(0, 60))  # fmt: skip
    def a_run_goes_on(self, run: str, what: str, nodes: tuple[str, ...], steps: int) -> None:
        coordinator = self.world.coordinators[run]
        if not coordinator.busy and what == "release":
            coordinator.start(what, lambda: coordinator.handoff.release(deadline_seconds=60.0))
        elif not coordinator.busy:
            coordinator.start(what, lambda: coordinator.give(what, nodes))
        self.world.loop.settle()
        self.world.calm(steps)

    @rule(steps=st.integers(1, 40))
    def messages_arrive_in_order(self, steps: int) -> None:
        self.world.calm(steps)

    @precondition(lambda self: self.world.ops)
    @rule(numbers=st.lists(anything, min_size=1, max_size=8))
    def messages_arrive_in_any_order(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.world.ops:
                self.world.deliver(self.world.ops[number % len(self.world.ops)])
                self.world.loop.settle()

    @precondition(lambda self: self.world.ops)
    @rule(number=anything, fault=st.sampled_from(("answer lost", "message lost", "late", "twice")))
    def a_message_fares_badly(self, number: int, fault: str) -> None:
        op = self.world.ops[number % len(self.world.ops)]
        if fault == "answer lost":
            self.world.deliver(op, answered=False)
        elif op.kind in ("Sleep", "Wake") or (op.kind == "append" and fault != "twice"):
            {"message lost": self.world.drop, "late": self.world.delay, "twice": self.world.duplicate}[fault](op)
        self.world.loop.settle()

    @precondition(lambda self: self.world.late)
    @rule(number=anything, steps=st.integers(0, 5))
    def a_late_message_arrives(self, number: int, steps: int) -> None:
        self.world.arrive_late(number)
        self.world.calm(steps)

    @rule(number=anything, fault=st.sampled_from(("worker", "coordinator", "NATS", "stream")))
    def something_dies(self, number: int, fault: str) -> None:
        """And comes back: NATS with the next passing of time, the others at once."""
        world = self.world
        if fault == "worker":
            process = list(world.tenants.values())[number % len(world.tenants)]
            world.crash_tenant(process)
            world.start_tenant(process.id.run_id, process.worker_id, process.node)
        elif fault == "coordinator":
            world.crash_coordinator(RUNS[number % len(RUNS)])
        elif fault == "NATS":
            world.server.up = False
        elif self.may_lose:
            world.lose_stream()
        world.loop.settle()

    @rule(seconds=st.sampled_from((0.0, 1.05, 3.0, 70.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.server.up = True
        self.world.server.tell()
        self.world.pass_time(seconds)

    @rule(number=anything)
    def work(self, number: int) -> None:
        processes = [p for p in self.world.tenants.values() if p.alive and p.resident]
        if processes:
            process = processes[number % len(processes)]
            task = self.world.loop.create_task(process.work())
            self.world.loop.settle()
            assert task.done()
            task.exception()

    @rule(seed=st.integers(0, 2**32))
    def much_happens(self, seed: int) -> None:
        """Fifty of the above, most of them messages that arrive: deeper than a list of rules gets."""
        dice = random.Random(seed)
        for _ in range(50):
            number, kind = dice.randrange(10_000), dice.random()
            if kind < 0.45 and self.world.ops:
                self.messages_arrive_in_any_order([number])
            elif kind < 0.65:
                self.messages_arrive_in_order(1)
            elif kind < 0.80:
                nodes = dice.choice((NODES[:1], NODES[1:], NODES))
                self.a_run_goes_on(dice.choice(RUNS), dice.choice((*PHASES, "release")), nodes, 0)
            elif kind < 0.88 and self.world.ops:
                self.a_message_fares_badly(number, dice.choice(("answer lost", "message lost", "late", "twice")))
            elif kind < 0.91 and self.world.late:
                self.a_late_message_arrives(number, 0)
            elif kind < 0.92:
                self.something_dies(number, dice.choice(("worker", "coordinator", "NATS", "stream")))
            elif kind < 0.94:
                self.work(number)
            else:
                self.time_passes(dice.choice((0.0, 0.0, 1.05, 3.0)))
            self.what_must_hold()

    @invariant()
    def what_must_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.runs_get_their_turn(STEPS)
            self.world.check()
        finally:
            self.world.close()


QUICK = settings(
    max_examples=30, stateful_step_count=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_the_protocol_holds() -> None:
    run_state_machine_as_test(Protocol, settings=QUICK)


@pytest.mark.slow
def test_the_protocol_holds_for_longer() -> None:
    run_state_machine_as_test(Protocol, settings=settings(QUICK, max_examples=200, derandomize=False))


def test_the_search_finds_a_protocol_that_lacks_a_law() -> None:
    broken = type("Broken", (Protocol,), {"mutant": "word before deed"})
    search = settings(QUICK, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(broken, settings=search)


# The shortest story to each law: it ends well with the law, and badly without.


def a_grant_arrives_after_its_coordinator_died(world: World) -> None:
    red, blue = world.coordinators["red"], world.coordinators["blue"]
    red.start("generate", lambda: red.give("generate", NODES[:1]))
    world.loop.settle()
    world.deliver(world.ops[0])
    world.loop.settle()
    world.delay(world.ops[0])
    world.crash_coordinator("red")
    blue.start("train", lambda: blue.give("train", NODES[:1]))
    world.loop.settle()
    world.calm(100)
    assert blue.done == ["train"]
    world.arrive_late(0)


def a_wake_arrives_late(world: World) -> None:
    red = world.coordinators["red"]
    red.start("generate", lambda: red.give("generate", NODES[:1]))
    world.loop.settle()
    while world.ops[0].kind != "Wake":
        world.deliver(world.ops[0])
        world.loop.settle()
    world.duplicate(world.ops[0])
    world.calm(100)
    red.start("train", lambda: red.give("train", NODES[:1]))
    world.loop.settle()
    world.calm(100)
    world.arrive_late(0)
    world.calm(100)


def a_sleep_overtakes_a_wake(world: World) -> None:
    red = world.coordinators["red"]
    red.start("generate", lambda: red.give("generate", NODES[:1]))
    world.loop.settle()
    world.calm(100, hold="take")
    slow = world.ops[0]
    assert slow.kind == "take"
    world.crash_coordinator("red")
    red = world.coordinators["red"]
    red.start("train", lambda: red.give("train", NODES[:1]))
    world.loop.settle()
    world.ops.remove(slow)
    world.calm(30)
    world.ops.append(slow)
    world.calm(100)


def sleeping_takes_its_time(world: World) -> None:
    red = world.coordinators["red"]
    red.start("generate", lambda: red.give("generate", NODES[:1]))
    world.loop.settle()
    world.calm(100)
    red.start("train", lambda: red.give("train", NODES[:1]))
    world.loop.settle()
    world.calm(30, hold="drain")
    world.check()
    world.calm(100)


def another_run_still_holds(world: World) -> None:
    red, blue = world.coordinators["red"], world.coordinators["blue"]
    red.start("generate", lambda: red.give("generate", NODES[:1]))
    world.loop.settle()
    world.calm(100)
    world.crash_coordinator("red")  # its claim ends, its engine lives
    for phase in ("load", "train"):  # the first fits beside it, the second does not
        blue.start(phase, lambda phase=phase: blue.give(phase, NODES[:1], 5.0))  # type: ignore[misc]
        world.loop.settle()
        world.calm(100)
    assert blue.done == ["load"]
    assert "engine-a of run red still holds for KV" in str(blue.error)


STORIES: dict[str, Callable[[World], None]] = {
    "append without expected sequence": a_grant_arrives_after_its_coordinator_died,
    "no check": a_wake_arrives_late,
    "check without lock": a_sleep_overtakes_a_wake,
    "word before deed": sleeping_takes_its_time,
    "grant forgets others": another_run_still_holds,
}


@pytest.mark.parametrize("law", STORIES)
def test_a_story_ends_badly_only_without_its_law(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told(STORIES[law], "")
    if law == "grant forgets others":
        monkeypatch.setattr(NodeState, "earlier", lambda self, shares: [])
    with pytest.raises(AssertionError):
        told(STORIES[law], law)


def told(story: Callable[[World], None], mutant: str) -> None:
    world = World(mutant)
    try:
        story(world)
        world.check()
        world.runs_get_their_turn(STEPS)
        world.check()
    finally:
        world.close()
