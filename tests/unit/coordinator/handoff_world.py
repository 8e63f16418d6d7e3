"""Two runs that share two nodes, as a simulation: real folds, guards and hand-overs, on a loop whose clock is ours.

Only NATS, the calls and the GPUs are simulated. Each message on its way is an `Op` that waits until somebody lets it
arrive, lose its answer, or get lost; the GPUs know what is really resident, whatever anybody believes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from antiphon.events.v1 import handoff_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV as KV
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_OPTIMIZER as OPTIMIZER
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS as WEIGHTS

from services.common.config import ServiceConfig
from services.common.errors import AntiphonError, Overloaded, Unavailable
from services.common.grants import ClaimsState, NodeState, TenantId
from services.common.handoff_log import CLAIMS_SUBJECT, Refused, node_subject
from services.common.tenancy import TenantGuard
from services.coordinator.handoff import Handoff, Wish
from services.coordinator.handoff_view import StreamLost

NODES = ("a", "b")
RUNS = ("red", "blue")
CAPACITY = 100
# What a worker's memory takes, whatever it was granted.
SIZES = {"engine": {WEIGHTS: 20, KV: 60}, "learner": {WEIGHTS: 20, OPTIMIZER: 60}}
# What is wished for, by phase: engine's tags, learner's tags.
PHASES: dict[str, dict[str, tuple[int, ...]]] = {
    "generate": {"engine": (WEIGHTS, KV)},
    "train": {"learner": (WEIGHTS, OPTIMIZER)},
    "load": {"engine": (WEIGHTS,)},
    "publish": {"engine": (WEIGHTS,), "learner": (WEIGHTS, OPTIMIZER)},
}


class Clockwork(asyncio.SelectorEventLoop):
    """A loop in which time passes only when told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Runs until everybody waits."""
        for _ in range(100_000):
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                return
        raise AssertionError("somebody runs for ever without waiting")


@dataclass
class Op:
    """A message on its way. `arrive` does what it is for; its answer goes to `answer`, if somebody still listens."""

    kind: str
    owner: object
    arrive: Callable[[], Any]
    answer: asyncio.Future[Any]
    lost: type[Exception] = Unavailable
    """What its sender gets when it, or its answer, is lost."""


@dataclass
class Server:
    """NATS with the stream: `messages` of the epoch, in order."""

    epochs: Any = field(default_factory=lambda: (f"epoch-{n}" for n in itertools.count(1)))
    epoch: str = ""
    up: bool = True
    sequence: int = 0
    messages: list[tuple[int, str, bytes]] = field(default_factory=list)
    news: dict[str, list[asyncio.Event]] = field(default_factory=dict)
    folds: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lose()

    def lose(self) -> None:
        """The stream is gone and was made anew."""
        self.epoch = next(self.epochs)
        self.sequence = 0
        self.messages = []
        self.folds = {node_subject(node): NodeState(self.epoch) for node in NODES}
        self.folds[CLAIMS_SUBJECT] = ClaimsState(self.epoch)

    def publish(self, subject: str, data: bytes, expected: int | None) -> int:
        last = max((s for s, name, _ in self.messages if name == subject), default=0)
        if expected is not None and last != expected:
            raise Refused(f"{subject}: expected {expected}, it is {last}")
        self.sequence += 1
        self.messages.append((self.sequence, subject, data))
        entry = handoff_pb2.HandoffEntry.FromString(data)
        self.folds[subject] = self.folds[subject].apply(self.sequence, entry)
        return self.sequence

    def state(self, node: str) -> NodeState:
        """What is true of a node."""
        state: NodeState = self.folds[node_subject(node)]
        return state

    def tell(self) -> None:
        """Everybody hears that something was stored."""
        heard, self.news = self.news, {}
        for event in itertools.chain.from_iterable(heard.values()):
            event.set()


class SimulatedStore:
    """services.common.handoff_log.Store of one process: reads answer at once, what is appended is an Op."""

    def __init__(self, world: World, owner: object) -> None:
        self._world = world
        self._owner = owner

    async def epoch(self) -> str:
        self._must_be_up()
        return self._world.server.epoch

    async def publish(self, subject: str, data: bytes, expected: int | None) -> int:
        self._must_be_up()
        if self._world.mutant == "append without expected sequence":
            expected = None

        def arrive() -> int:
            self._must_be_up()
            return self._world.server.publish(subject, data, expected)

        sequence: int = await self._world.op("append", self._owner, arrive, TimeoutError)
        return sequence

    async def next(self, subject: str, after: int) -> tuple[int, bytes] | None:
        self._must_be_up()
        found = ((s, data) for s, name, data in self._world.server.messages if name == subject and s > after)
        return next(found, None)

    def news(self, subject: str) -> asyncio.Event:
        event = asyncio.Event()
        self._world.server.news.setdefault(subject, []).append(event)
        return event

    def _must_be_up(self) -> None:
        if not self._world.server.up:
            raise Unavailable("NATS is away")


class TenantProcess:
    """One life of a worker: its guard is real, its memory is on the simulated GPU of its node."""

    def __init__(self, world: World, run: str, worker_id: str, node: str) -> None:
        self.worker_id = worker_id
        self.instance_id = f"life-{next(world.lives)}"
        self.id = TenantId(run, worker_id, self.instance_id)
        self.node = node
        self.sizes = SIZES[worker_id.partition("-")[0]]
        self.resident: set[int] = set()
        self.alive = True
        self._world = world
        service = ServiceConfig(
            run_id=run, worker_id=worker_id, run_dir=Path("."), nats_url="", instance_id=self.instance_id,
            node=node, shares_gpus=True,
        )  # fmt: skip
        self.guard = TenantGuard(service)
        self.tasks = [world.loop.create_task(self.guard.follow(SimulatedStore(world, self)))]

    async def sleep(self, request: tenant_pb2.SleepRequest) -> tenant_pb2.SleepResponse:
        async with self._moving(request.token):
            if self._world.mutant == "word before deed":
                await self.guard.slept(tenant_pb2.SleepResponse(), list(request.tags))
            await self._world.op("drain", self, lambda: None)
            self.resident -= set(request.tags)
            await self.guard.slept(tenant_pb2.SleepResponse(), list(request.tags))
        return tenant_pb2.SleepResponse()

    async def wake(self, request: tenant_pb2.WakeRequest) -> tenant_pb2.WakeResponse:
        tags = set(request.tags)
        async with self._moving(request.token, list(request.tags)):
            if not tags <= self.resident:
                await self._world.op("take", self, lambda: None)
                self._take(tags)
            await self.guard.woke(tenant_pb2.WakeResponse(), list(request.tags))
        return tenant_pb2.WakeResponse()

    async def work(self) -> None:
        """A call that uses what is resident, under the token that its caller would have."""
        token = self._world.server.state(self.node).token(self.id)
        tags = set(self.resident)
        if token is None or not tags:
            return
        await self.guard.check(token, tags)
        held = self._world.held(self)
        if self.alive and tags <= self.resident and not tags <= held and not self._world.lost_stream:
            self._world.violations.append(f"{self.id} works on {tags} and may have {held}")

    def _take(self, tags: set[int]) -> None:
        new = tags - self.resident
        held = self._world.held(self)
        if not new <= held and not self._world.lost_stream:
            self._world.violations.append(f"{self.id} takes {new} and may have {held}")
        needed = sum(self.sizes[tag] for tag in new)
        free = CAPACITY - self._world.resident_bytes(self.node)
        if needed > free:
            if not self._world.lost_stream:
                self._world.violations.append(f"{self.id} needs {needed} of {free} that are free on {self.node}")
            raise Overloaded(f"needs {needed}, {free} are free")
        self.resident |= new

    @asynccontextmanager
    async def _moving(self, token: Any, tags: Any = ()) -> Any:
        if self._world.mutant == "no check":
            self.guard._token.CopyFrom(token)
            yield
        elif self._world.mutant == "check without lock":
            await self.guard.check(token, tags)
            yield
        else:
            async with self.guard.moving(token, tags):
                yield


class TenantCall:
    """services.coordinator.handoff.Tenant: a call is an Op on its way there; its answer comes when the handler ends."""

    def __init__(self, world: World, process: TenantProcess) -> None:
        self.worker_id = process.worker_id
        self.instance_id = process.instance_id
        self._world = world
        self._process = process

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse:
        answer: tenant_pb2.SleepResponse = await self._call("Sleep", self._process.sleep, request)
        return answer

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse:
        answer: tenant_pb2.WakeResponse = await self._call("Wake", self._process.wake, request)
        return answer

    async def _call(self, kind: str, handler: Callable[[Any], Coroutine[Any, Any, Any]], request: Any) -> Any:
        process = self._process

        def arrive() -> asyncio.Future[Any]:
            if not process.alive:
                raise Unavailable(f"{process.id}: connection refused")
            task = self._world.loop.create_task(handler(request))
            process.tasks.append(task)
            return task

        return await self._world.op(kind, self, arrive)


class Coordinator:
    """One life of a run's coordinator."""

    def __init__(self, world: World, run: str) -> None:
        self.run = run
        self.instance_id = f"life-{next(world.lives)}"
        self.id = TenantId(run, "coordinator-0", self.instance_id)
        self._world = world
        self.handoff = Handoff(
            SimulatedStore(world, self),
            run_id=run,
            instance_id=self.instance_id,
            capacity={node: {f"gpu-{node}": CAPACITY} for node in NODES},
            tenants=lambda: [TenantCall(world, p) for p in world.tenants.values() if p.id.run_id == run],
        )
        self.task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self.done: list[str] = []

    @property
    def busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def start(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            self.error = None
            try:
                await work()
            except AntiphonError as error:
                self.error = error
            else:
                self.done.append(what)

        self.task = self._world.loop.create_task(guarded())

    async def give(self, phase: str, nodes: tuple[str, ...], seconds: float = 60.0) -> None:
        """A hand-over, and what must be so right after it."""
        world = self._world
        losses = world.losses
        found = [(world.tenants[self.run, f"{kind}-{node}"], tags) for node in nodes
                 for kind, tags in PHASES[phase].items()]  # fmt: skip
        wishes = [
            Wish(TenantCall(world, p), p.node, {tag: {f"gpu-{p.node}": p.sizes[tag]} for tag in tags})
            for p, tags in found
        ]
        await self.handoff.to(wishes, deadline_seconds=seconds)
        for process, tags in found:
            if process.alive and losses == world.losses and not set(tags) <= process.resident:
                world.violations.append(f"{process.id} was given {tags} and has {process.resident}")


class World:
    """Everything, and the faults that may happen to it."""

    def __init__(self, mutant: str = "") -> None:
        self.mutant = mutant
        self.loop = Clockwork()
        self.server = Server()
        self.ops: list[Op] = []
        self.late: list[Op] = []
        self.lives = itertools.count()
        self.losses = 0
        self.violations: list[str] = []
        self._checked = ("", 0)
        self.tenants: dict[tuple[str, str], TenantProcess] = {}
        self.coordinators: dict[str, Coordinator] = {}
        for run in RUNS:
            self.coordinators[run] = Coordinator(self, run)
            for node in NODES:
                for kind in SIZES:
                    self.start_tenant(run, f"{kind}-{node}", node)
        self.loop.settle()

    @property
    def lost_stream(self) -> bool:
        return self.losses > 0

    def held(self, process: TenantProcess) -> set[int]:
        holding = self.server.state(process.node).holdings.get(process.id)
        return set() if holding is None else set(holding.memory)

    def resident_bytes(self, node: str) -> int:
        return sum(p.sizes[tag] for p in self.tenants.values() if p.node == node for tag in p.resident)

    async def op(self, kind: str, owner: object, arrive: Callable[[], Any], lost: type[Exception] = Unavailable) -> Any:
        op = Op(kind, owner, arrive, self.loop.create_future(), lost)
        op.answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.ops.append(op)
        return await op.answer

    # What may happen to a message

    def deliver(self, op: Op, *, answered: bool = True) -> None:
        """It arrives; without `answered` its sender never hears what came of it."""
        self.ops.remove(op)
        try:
            result = op.arrive()
        except Exception as error:
            result = None
            failed = error if answered or isinstance(error, Unavailable) else op.lost("no answer")
            _answer(op, failed)
            return
        if not answered:
            _answer(op, op.lost("no answer"))
        elif isinstance(result, asyncio.Future):
            result.add_done_callback(lambda task: _answer(op, _outcome(task)))
        else:
            _answer(op, result)

    def drop(self, op: Op) -> None:
        """It never arrives."""
        self.ops.remove(op)
        _answer(op, op.lost("lost"))

    def delay(self, op: Op) -> None:
        """Its sender gives up on it, and it arrives later."""
        self.ops.remove(op)
        _answer(op, op.lost("no answer yet"))
        self.late.append(op)

    def duplicate(self, op: Op) -> None:
        """A call arrives twice: once more later."""
        self.late.append(replace(op, answer=self.loop.create_future()))

    def arrive_late(self, number: int) -> None:
        op = self.late.pop(number % len(self.late))
        self.ops.append(op)
        self.deliver(op)
        self.loop.settle()

    # What may happen to processes

    def start_tenant(self, run: str, worker_id: str, node: str) -> None:
        self.tenants[run, worker_id] = TenantProcess(self, run, worker_id, node)

    def crash_tenant(self, process: TenantProcess) -> None:
        """Its memory is free at once; that it ended is said later."""
        process.alive = False
        process.resident.clear()
        self.end(process, process.tasks)
        self.attest(process.id, process.node)

    def crash_coordinator(self, run: str) -> None:
        """What it sent may still arrive. Its successor may be there before the word of its end."""
        old = self.coordinators[run]
        self.end(old, [old.task] if old.task else [])
        self.attest(old.id, None)
        self.coordinators[run] = Coordinator(self, run)

    def end(self, owner: object, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        for op in [op for op in self.ops if op.owner is owner and op.kind in ("drain", "take")]:
            self.ops.remove(op)
        self.loop.settle()

    def attest(self, ended: TenantId, node: str | None) -> None:
        """The supervisor says it until it is stored."""
        subject = CLAIMS_SUBJECT if node is None else node_subject(node)

        def arrive() -> None:
            if not self.server.up:
                self.attest(ended, node)
                return
            exited = handoff_pb2.Exited(tenant=ended.message())
            entry = handoff_pb2.HandoffEntry(epoch=self.server.epoch, nonce=str(next(self.lives)), exited=exited)
            self.server.publish(subject, entry.SerializeToString(), None)

        answer: asyncio.Future[Any] = self.loop.create_future()
        self.ops.append(Op("attest", self, arrive, answer))

    def lose_stream(self) -> None:
        self.losses += 1
        self.server.lose()

    # Time, and the end of all faults

    def pass_time(self, seconds: float) -> None:
        self.loop.now += seconds
        self.loop.settle()

    def calm(self, steps: int, hold: str = "") -> int:
        """Lets everything arrive in order, until nobody is busy; answers the steps that were left. Messages of the kind
        `hold` stay on their way.
        """
        while steps > 0:
            ops = [op for op in self.ops if op.kind != hold]
            if not ops and not any(c.busy for c in self.coordinators.values()):
                break
            steps -= 1
            if ops:
                self.deliver(ops[0])
            else:
                self.server.tell()
                self.loop.settle()
                if all(op.kind == hold for op in self.ops):
                    self.pass_time(1.05)
            self.loop.settle()
        return steps

    def check(self) -> None:
        """What must hold at any time."""
        assert not self.violations, self.violations
        for node in NODES:
            resident = self.resident_bytes(node)
            assert resident <= CAPACITY, f"{node}: {resident} resident of {CAPACITY}"
            if self.lost_stream:
                continue  # a new stream learns only later what was resident
            state = self.server.state(node)
            granted = sum(sum(gpus.values()) for h in state.holdings.values() for gpus in h.memory.values())
            assert granted <= CAPACITY, f"{node}: {granted} granted of {CAPACITY}: {state.holdings}"
            for process in self.tenants.values():
                if process.node == node:
                    assert process.resident <= self.held(process), f"{process.id} has what was not granted"
        if self._checked != (self.server.epoch, self.server.sequence):
            self._checked = (self.server.epoch, self.server.sequence)
            self._check_that_a_fold_may_begin_at_the_last_grant()

    def _check_that_a_fold_may_begin_at_the_last_grant(self) -> None:
        for node in NODES:
            late, seen = NodeState(self.server.epoch), False
            for sequence, subject, data in self.server.messages:
                entry = handoff_pb2.HandoffEntry.FromString(data)
                if subject == node_subject(node) and entry.HasField("grant") and entry.epoch == self.server.epoch:
                    late, seen = NodeState(self.server.epoch).apply(sequence, entry), True
                elif subject == node_subject(node):
                    late = late.apply(sequence, entry)
            full = self.server.state(node)
            if seen:
                brief = [{t: (h.sequence, h.memory) for t, h in s.holdings.items()} for s in (late, full)]
                assert brief[0] == brief[1]
                assert late.exited == full.exited

    def runs_get_their_turn(self, steps: int) -> None:
        """Faults stop and everybody is up: each run gets through all phases on both nodes and then lets go of them."""
        self.server.up = True
        while self.late:
            self.arrive_late(0)
        for (run, worker_id), process in list(self.tenants.items()):
            if not process.alive:
                self.start_tenant(run, worker_id, process.node)
        left = self.calm(steps)
        for coordinator in self.coordinators.values():
            coordinator.done.clear()
            coordinator.start("all", lambda c=coordinator: self._all_phases(c))  # type: ignore[misc]
        left = self.calm(left)
        for coordinator in self.coordinators.values():
            assert coordinator.done == ["all"], f"{coordinator.run}: {coordinator.error!r}, {left} steps left"
        for node in NODES:
            assert self.resident_bytes(node) == 0
            assert not any(holding.memory for holding in self.server.state(node).holdings.values())

    async def _all_phases(self, coordinator: Coordinator) -> None:
        for phase in PHASES:
            try:
                await coordinator.give(phase, NODES)
            except StreamLost:  # noticed only now; it begins anew
                await coordinator.give(phase, NODES)
        await coordinator.handoff.release(deadline_seconds=60.0)

    def close(self) -> None:
        for process in self.tenants.values():
            self.end(process, process.tasks)
        for coordinator in self.coordinators.values():
            self.end(coordinator, [coordinator.task] if coordinator.task else [])
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.pass_time(100.0)
        self.loop.close()


def _answer(op: Op, result: Any) -> None:
    if op.answer.done():
        return
    if isinstance(result, BaseException):
        op.answer.set_exception(result)
    else:
        op.answer.set_result(result)


def _outcome(task: asyncio.Future[Any]) -> Any:
    if task.cancelled():
        return Unavailable("the worker died")
    return task.exception() or task.result()
