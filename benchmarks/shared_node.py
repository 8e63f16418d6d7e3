"""A learner and an engine that share one node's GPUs: real services under real grants, driven as `hybrid` drives them.

    start    grant: learner     it loads ▶ grant: engine (the learner sleeps)   it starts
    refill   grant: learner's weights + engine     the engine's weights come back empty, its keys and values sleep on ▶
             publication, whose commit wakes them
    sample   grant: engine      the learner sleeps ▶ Generate
    train    grant: learner     the engine sleeps ▶ TrainStep

For benchmarks/handoff.py and tests/system/test_handoff_services.py. On CPU there is no memory to hand over; who may
act, what is refused and what a publication has to do are the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.learner.v1 import learner_pb2
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2, policy_pb2, transfer_pb2
from antiphon.types.v1.trajectory_pb2 import PromptId, Trajectory

from services.cli.launch import exits, nats_server
from services.cli.run_processes import kill_processes
from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import new_request_id
from services.common.config import Config, ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.digest import digest_messages
from services.common.errors import AntiphonError
from services.common.grants import Memory, NodeState, Tag
from services.common.handoff_log import SubjectLog, node_subject
from services.common.handoff_stream import JetStreamStore
from services.common.processes import INSTANCE_ID_VARIABLE, RUN_ID_VARIABLE, spawn
from services.coordinator.clients import LearnerClient, RolloutClient
from services.coordinator.config import PublicationConfig
from services.coordinator.handoff import Handoff, Tenant, Wish
from services.coordinator.publication import Publication, Published
from services.coordinator.workers import LEARNER, ROLLOUT, Workers
from services.learner.config import LearnerConfig
from services.rollout.config import RolloutConfig
from services.rollout.config import environment as rollout_environment

WEIGHTS = grant_pb2.MEMORY_TAG_WEIGHTS
KV = grant_pb2.MEMORY_TAG_KV
OPTIMIZER = grant_pb2.MEMORY_TAG_OPTIMIZER

NODE = "node-0.example"
LEARNER_ID, ENGINE_ID = "learner-0", "rollout-0"
START_SECONDS = 300.0  # until a worker has loaded its model; the first start of vLLM compiles
HAND_OVER_SECONDS = 60.0
CALL_SECONDS = 60.0
END_SECONDS = 10.0
LOG_CHARACTERS = 6000


@dataclass(frozen=True)
class Sizes:
    """What each may have on the GPU, by tag, and what there is to grant: GPU uuid → bytes. On CPU nothing is there."""

    learner: Memory
    engine: Memory
    capacity: Mapping[str, int]


ON_CPU = Sizes(learner={WEIGHTS: {}, OPTIMIZER: {}}, engine={WEIGHTS: {}, KV: {}}, capacity={})


@dataclass(frozen=True)
class Move:
    """One Sleep or Wake as its caller saw it."""

    worker_id: str
    kind: str
    tags: tuple[Tag, ...]
    call_seconds: float
    seconds: float
    """By the worker."""
    devices: Sequence[tenant_pb2.DeviceChange]

    @property
    def bytes(self) -> int:
        """That came free, or were taken, by the driver."""
        return sum(abs(device.free_bytes_after - device.free_bytes_before) for device in self.devices)


class _Measured:
    """A tenant whose moves are written down."""

    def __init__(self, client: LearnerClient | RolloutClient, note: Callable[[Move], None]) -> None:
        self.worker_id = client.worker_id
        self.instance_id = client.instance_id
        self._client = client
        self._note = note

    async def sleep(self, request: tenant_pb2.SleepRequest, deadline_seconds: float) -> tenant_pb2.SleepResponse:
        begin = time.monotonic()
        answer = await self._client.sleep(request, deadline_seconds)
        took = time.monotonic() - begin
        self._note(Move(self.worker_id, "sleep", tuple(request.tags), took, answer.seconds, answer.devices))
        return answer

    async def wake(self, request: tenant_pb2.WakeRequest, deadline_seconds: float) -> tenant_pb2.WakeResponse:
        begin = time.monotonic()
        answer = await self._client.wake(request, deadline_seconds)
        took = time.monotonic() - begin
        self._note(Move(self.worker_id, "wake", tuple(request.tags), took, answer.seconds, answer.devices))
        return answer


@dataclass
class _Service:
    """One life of a worker's process, and the task that tells its end as a launcher would."""

    config: ServiceConfig
    process: asyncio.subprocess.Process
    may_tell: asyncio.Event
    watcher: asyncio.Task[None]


class SharedNode:
    """The processes and the run's side of them. Made by `started`."""

    def __init__(
        self, folder: Path, model: ModelConfig, learner: LearnerConfig, engine: RolloutConfig, sizes: Sizes
    ) -> None:
        self.sizes = sizes
        self.moves: list[Move] = []
        """Of the last hand-over."""
        self.hand_over_seconds = 0.0
        """Of the last one, all in all."""
        self.tokens: dict[str, grant_pb2.GrantToken] = {}
        """Of the latest grant, by worker id."""
        self.former: dict[str, grant_pb2.GrantToken] = {}
        """The newest token of each worker that is not its latest any more."""
        self.run_id = f"handoff-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._model = model
        self._settings: dict[str, Config] = {LEARNER_ID: learner, ENGINE_ID: engine}
        self._services: dict[str, _Service] = {}
        self._rows = 0

    # Starting and ending

    async def start_processes(self) -> None:
        """NATS and both services, which wait for their grants."""
        folder = self._folder / "nats"
        folder.mkdir(parents=True)
        command = [nats_server.find_binary(), "-c", str(nats_server.write_config(folder))]
        self._nats = await spawn(command, environment=self._environment({}), log=self.log("nats"))
        self._url, self._monitor = await nats_server.wait_until_listening(folder, self._nats, self.log("nats"))
        self.bus = await Bus.connect(self._url, "benchmark", self._monitor)
        registry = Registry(self.bus, self.run_id)
        self._registry = registry
        self._listening = asyncio.create_task(registry.run())
        self.workers = Workers(registry, {LEARNER: 1, ROLLOUT: 1})
        self._store = await JetStreamStore.open(self.bus)
        self.handoff = Handoff(
            self._store,
            run_id=self.run_id,
            instance_id=uuid.uuid4().hex,
            capacity={NODE: self.sizes.capacity},
            tenants=self._tenants,
        )
        config = PublicationConfig(bucket_mib=512 if self.sizes.capacity else 1, deadline_seconds=CALL_SECONDS)
        self.publication = Publication(self.workers, config, self._model.dtype)
        for worker_id in (LEARNER_ID, ENGINE_ID):
            await self.start_service(worker_id)

    async def start_service(self, worker_id: str) -> None:
        """A new life of a worker, until it announces itself; it takes no memory before a grant."""
        config = ServiceConfig(
            run_id=self.run_id,
            worker_id=worker_id,
            run_dir=self._folder,
            nats_url=self._url,
            nats_monitor_url=self._monitor,
            node=NODE,
            shares_gpus=True,
        )
        settings = self._settings[worker_id]
        path = self._folder / f"{config.instance_id}.yaml"
        path.write_text(dump(ProcessConfig[Any](service=config, model=self._model, settings=settings)))
        kind = worker_id.partition("-")[0]
        own = rollout_environment(settings) if isinstance(settings, RolloutConfig) else {}
        process = await spawn(
            [sys.executable, "-m", f"services.{kind}", "--config", str(path)],
            environment=self._environment({**own, INSTANCE_ID_VARIABLE: config.instance_id}),
            log=self.log(worker_id),
        )
        may_tell = asyncio.Event()
        may_tell.set()
        watcher = asyncio.create_task(_watch(config, process, may_tell), name=f"end of {worker_id}")
        self._services[worker_id] = _Service(config, process, may_tell, watcher)

        def is_there() -> bool:
            if process.returncode is not None:
                raise RuntimeError(f"{worker_id} ended with exit code {process.returncode}; log: {self.log(worker_id)}")
            return any(tenant.instance_id == config.instance_id for tenant in self.workers.tenants())

        if not await self._registry.wait_for(is_there, START_SECONDS):
            raise RuntimeError(f"{worker_id} was not heard of within {START_SECONDS:.0f} s")

    async def load(self) -> None:
        """The learner loads under its grant, then the engine under its own."""
        await self.give(learner=(WEIGHTS, OPTIMIZER), seconds=START_SECONDS)
        await self.give(engine=(WEIGHTS, KV), seconds=START_SECONDS)

    async def stop(self) -> None:
        """Ends everything of the run."""
        self._listening.cancel()
        for service in self._services.values():
            service.watcher.cancel()
        await self.workers.close()
        await self.bus.close()
        left = await asyncio.to_thread(kill_processes, self.run_id, END_SECONDS)
        if left:
            print(f"still alive after SIGKILL: {left}", flush=True)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def print_logs(self) -> None:
        """The end of each log, the ranks' included."""
        for path in sorted([*self._folder.glob("*.log"), *self._folder.glob("logs/*.log")]):
            print(f"\n--- the end of {path}\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}", flush=True)

    # Hand-overs

    async def give(
        self,
        *,
        learner: Sequence[Tag] = (),
        engine: Sequence[Tag] = (),
        asleep: Sequence[Tag] = (),
        discard: bool = False,
        seconds: float = HAND_OVER_SECONDS,
    ) -> None:
        """A hand-over to these tags of the two; those of `asleep` are granted to the engine and not woken."""
        wishes = []
        for worker_id, tags, memory in (
            (LEARNER_ID, learner, self.sizes.learner),
            (ENGINE_ID, (*engine, *asleep), self.sizes.engine),
        ):
            if tags:
                wake = frozenset(tags) - frozenset(asleep)
                wishes.append(Wish(self._tenant(worker_id), NODE, {tag: memory[tag] for tag in tags}, wake))
        self.moves.clear()
        begin = time.monotonic()
        tokens = await self.handoff.to(wishes, deadline_seconds=seconds, discard_weights=[ENGINE_ID] if discard else [])
        self.hand_over_seconds = time.monotonic() - begin
        self.former |= self.tokens
        self.tokens = {wish.tenant.worker_id: tokens[NODE] for wish in wishes}

    async def refill(self, version: int) -> Published:
        """Weights of both sides, and the publication that fills the engine's and wakes its keys and values."""
        await self.give(learner=[WEIGHTS], engine=[WEIGHTS], asleep=[KV], discard=True)
        return await self.publish(version)

    async def publish(self, version: int) -> Published:
        return await self.publication.publish(version, tokens=self.tokens)

    async def state(self) -> NodeState:
        """What the log says of the node now."""
        return await self._log().refresh()

    async def until_held_by(self, worker_id: str) -> None:
        """Waits until a grant gave the worker something."""
        async with asyncio.timeout(HAND_OVER_SECONDS):
            await self._log().wait_for(
                lambda state: any(t.worker_id == worker_id and h.memory for t, h in state.holdings.items())
            )

    # Work

    @property
    def learner(self) -> LearnerClient:
        return self.workers.learner()

    @property
    def engine(self) -> RolloutClient:
        return next(client for client in self.workers.rollouts() if client.worker_id == ENGINE_ID)

    async def generate(
        self, prompt: Sequence[int], *, samples: int = 1, max_tokens: int = 16, temperature: float = 1.0
    ) -> list[Trajectory]:
        """In the order of their sample numbers."""
        self._rows += 1
        request = self._generate_request(prompt, samples, max_tokens, temperature, self.tokens.get(ENGINE_ID))
        async with aclosing(self.engine.generate(request, CALL_SECONDS)) as trajectories:
            return sorted([t async for t in trajectories], key=lambda t: t.sample_number)

    async def greedy(self, prompt: Sequence[int], max_tokens: int = 16) -> tuple[list[int], int]:
        """The likeliest answer, and the version that gave it."""
        (trajectory,) = await self.generate(prompt, max_tokens=max_tokens, temperature=0.0)
        return list(trajectory.token_ids[len(prompt) :]), trajectory.version_spans[-1].policy_version

    async def train(self, rows: Sequence[learner_pb2.TrainTrajectory]) -> learner_pb2.StepResult:
        """One Step of one Update on all rows."""
        version = (await self.learner.state()).policy.version
        header = step_header(version + 1, rows, self.tokens.get(LEARNER_ID))
        return await self.learner.train_step(header, rows, CALL_SECONDS)

    def _generate_request(
        self, prompt: Sequence[int], samples: int, max_tokens: int, temperature: float, token: Any
    ) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            request_id=new_request_id(),
            prompt_id=PromptId(dataset="handoff", row=self._rows),
            prompt_token_ids=prompt,
            samples=samples,
            sampling=rollout_pb2.Sampling(temperature=temperature, max_tokens=max_tokens),
            token=token,
        )

    # Failures

    async def refusals(self) -> dict[str, str]:
        """Every call that touches GPUs, with the token that its worker had before: call → what came of it.

        "Conflict: …" is right; "answered" is not.
        """
        learner, engine = self.learner, self.engine
        ours, theirs = self.former[LEARNER_ID], self.former[ENGINE_ID]
        rows = training_rows(2, 8, 50, seed=1)
        version = (await learner.state()).policy.version
        join = learner_pb2.JoinTransferRequest(
            epoch=1 << 20, transport=transfer_pb2.TRANSPORT_GLOO, receiver_ranks=1, bucket_bytes=1 << 20,
            deadline_seconds=1.0, token=ours,
        )  # fmt: skip
        publish = learner_pb2.PublishRequest(
            request_id=new_request_id(), epoch=1, policy_version=version, deadline_seconds=1.0, token=ours
        )
        begin = rollout_pb2.BeginUpdateRequest(
            request_id=new_request_id(), epoch=1, policy_version=version, deadline_seconds=1.0, token=theirs
        )
        commit = rollout_pb2.CommitUpdateRequest(
            request_id=new_request_id(), policy=policy_pb2.Policy(version=version, digest=1), probe_token_ids=[1, 2],
            probe_logprobs=[-1.0], probe_tolerance=1.0, token=theirs,
        )  # fmt: skip
        generate = self._generate_request([1, 2, 3], 1, 2, 1.0, theirs)
        calls: dict[str, Coroutine[Any, Any, Any]] = {
            "learner TrainStep": learner.train_step(step_header(version + 1, rows, ours), rows, CALL_SECONDS),
            "learner JoinTransfer": learner.join_transfer(join, CALL_SECONDS),
            "learner Publish": learner.publish(publish, CALL_SECONDS),
            "engine Generate": _all_of(engine, generate),
            "engine BeginUpdate": engine.begin_update(begin, CALL_SECONDS),
            "engine CommitUpdate": engine.commit_update(commit, CALL_SECONDS),
        }
        for name, client, token in (("learner", learner, ours), ("engine", engine, theirs)):
            sleep = tenant_pb2.SleepRequest(request_id=new_request_id(), token=token, deadline_seconds=5.0)
            wake = tenant_pb2.WakeRequest(request_id=new_request_id(), token=token, deadline_seconds=5.0)
            calls |= {f"{name} Sleep": client.sleep(sleep, CALL_SECONDS)}
            calls |= {f"{name} Wake": client.wake(wake, CALL_SECONDS)}
        outcomes = {}
        for name, call in calls.items():
            try:
                await call
                outcomes[name] = "answered"
            except AntiphonError as error:
                outcomes[name] = f"{type(error).__name__}: {error}"
        return outcomes

    async def standing(self) -> list[tuple[Any, ...]]:
        """What a refused call must leave as it is: state, policy, what sleeps and what is held, of both."""
        states = [await self.learner.state(), await self.engine.state()]
        return [
            (s.state, s.policy.version, s.policy.digest, list(s.asleep), [list(d.held) for d in s.devices])
            for s in states
        ]

    def kill(self, worker_id: str, *, tell: bool = True) -> None:
        """SIGKILL to the service's own process; its children follow it. Without `tell` its supervisor is silent."""
        service = self._services[worker_id]
        if not tell:
            service.may_tell.clear()
        service.process.kill()

    def tell_end(self, worker_id: str) -> None:
        """The supervisor says now what it has kept back."""
        self._services[worker_id].may_tell.set()

    def is_alive(self, worker_id: str) -> bool:
        """Whether its process has not ended."""
        return self._services[worker_id].process.returncode is None

    async def ended(self, worker_id: str) -> None:
        """Waits until the supervisor has told the end of the worker."""
        async with asyncio.timeout(HAND_OVER_SECONDS):
            await asyncio.wait({self._services[worker_id].watcher})

    async def learner_rank(self) -> int:
        """Process id of the learner's first rank."""
        return int((await self.learner.state()).pids[1])

    async def processes(self) -> dict[str, list[int]]:
        """Process ids by worker."""
        return {
            "nats": [self._nats.pid],
            LEARNER_ID: list((await self.learner.state()).pids),
            ENGINE_ID: list((await self.engine.state()).pids),
        }

    def _log(self) -> SubjectLog[NodeState]:
        return SubjectLog(self._store, node_subject(NODE), NodeState, NodeState.apply)

    def _tenant(self, worker_id: str) -> Tenant:
        current = self._services[worker_id].config.instance_id
        return next(tenant for tenant in self._tenants() if tenant.instance_id == current)

    def _tenants(self) -> list[Tenant]:
        return [_Measured(client, self.moves.append) for client in self.workers.tenants()]

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """As services/cli/launch/local.py has it."""
        everyone = {RUN_ID_VARIABLE: self.run_id, "SPT_NOENV": "1", "HF_HUB_OFFLINE": "1"}
        return {**os.environ, "TOKENIZERS_PARALLELISM": "false", **everyone, **own}


@asynccontextmanager
async def started(
    folder: Path, model: ModelConfig, learner: LearnerConfig, engine: RolloutConfig, sizes: Sizes
) -> AsyncIterator[SharedNode]:
    """The node with both services waiting for their grants; all is gone afterwards, and logs are printed on errors."""
    shutil.rmtree(folder, ignore_errors=True)
    node = SharedNode(folder, model, learner, engine, sizes)
    try:
        await node.start_processes()
        yield node
    except BaseException:
        await asyncio.to_thread(node.print_logs)
        raise
    finally:
        await node.stop()


async def _watch(config: ServiceConfig, process: asyncio.subprocess.Process, may_tell: asyncio.Event) -> None:
    code = await process.wait()
    await may_tell.wait()
    await exits.tell_exited(config, process.pid, code, coordinator=False)


def training_rows(count: int, tokens: int, vocabulary: int, *, seed: int) -> list[learner_pb2.TrainTrajectory]:
    """Random rows of so many tokens each, half of them prompt."""
    dice = random.Random(seed)
    prompt = tokens // 2
    return [
        learner_pb2.TrainTrajectory(
            trajectory_id=f"row-{number}",
            token_ids=[dice.randrange(vocabulary) for _ in range(tokens)],
            loss_mask=[False] * prompt + [True] * (tokens - prompt),
            advantages=[dice.gauss(0, 1) for _ in range(tokens)],
        )
        for number in range(count)
    ]


def step_header(
    step_id: int, rows: Sequence[learner_pb2.TrainTrajectory], token: grant_pb2.GrantToken | None
) -> learner_pb2.StepHeader:
    """One Update on all rows."""
    header = learner_pb2.StepHeader(
        step_id=step_id, batch_digest=digest_messages(rows), trajectory_count=len(rows), token=token
    )
    header.policy.loss = learner_pb2.POLICY_LOSS_PPO
    header.policy.aggregation = learner_pb2.AGGREGATION_TOKEN
    header.policy.clip_low = header.policy.clip_high = 0.2
    header.policy.temperature = 1.0
    header.updates.add(
        trajectory_ids=[row.trajectory_id for row in rows], token_count=sum(sum(row.loss_mask) for row in rows)
    )
    return header


async def _all_of(engine: RolloutClient, request: rollout_pb2.GenerateRequest) -> list[Trajectory]:
    async with aclosing(engine.generate(request, CALL_SECONDS)) as trajectories:
        return [trajectory async for trajectory in trajectories]
