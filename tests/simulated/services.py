"""The three simulated services of a run, each behind a real gRPC server and announced over a real NATS server."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc
from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc

from services.common.announcements import Announcer
from services.common.bus import Bus
from services.common.server import Server
from tests.simulated.learner import SimulatedLearner
from tests.simulated.reward import SimulatedReward
from tests.simulated.rollout import SimulatedRollout
from tests.tiny.models import BOS, CHAT_TEMPLATE, EOS, PAD, make_tokenizer

ROLLOUT = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
REWARD = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
LEARNER = learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name
TENANT = tenant_pb2.DESCRIPTOR.services_by_name["TenantService"].full_name


def write_model_folder(folder: Path) -> Path:
    """What the coordinator needs of a model: tokenizer, chat template, the end-of-sequence token. No weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(EOS)}))
    return folder


def render_and_encode(tokenizer: tokenizers.Tokenizer) -> Callable[[Any], list[int]]:
    """The other side's own way from a conversation to token ids: written out, no template engine."""

    def encode(messages: Any) -> list[int]:
        text = BOS + "".join(f"<{m['role']}>{m['content']}{EOS}" for m in messages) + "<assistant>"
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


class Announced:
    """A server and its announcement; `die` is what a kill looks like from outside."""

    def __init__(self, bus: Bus, run_id: str, worker_id: str, kind: Any, state: Callable[[], Any]) -> None:
        self.worker_id = worker_id
        self.server = Server("127.0.0.1", 0, _well)
        self._bus = bus
        self._run_id = run_id
        self._kind = kind
        self._state = state
        self._announcer: Announcer | None = None
        self._announcing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.server.start()

        def describe(announcement: events_pb2.WorkerAnnouncement) -> None:
            announcement.state = self._state()

        self._announcer = Announcer(
            self._bus,
            run_id=self._run_id,
            worker_id=self.worker_id,
            kind=self._kind,
            address=self.server.address,
            node="simulated",
            instance_id=uuid.uuid4().hex,
            describe=describe,
        )
        self._announcing = asyncio.create_task(self._announcer.run())

    def changed(self) -> None:
        """Announces the state now."""
        assert self._announcer is not None
        self._announcer.changed()

    async def die(self) -> None:
        """Every call breaks now; the announcement is withdrawn."""
        await self.server.stop(0.0)
        await self.fall_silent()

    async def fall_silent(self) -> None:
        """Is not heard of any more; serves on."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)


@dataclass
class Simulation:
    """What the tests turn and look at."""

    rollouts: list[SimulatedRollout]
    rewards: list[SimulatedReward]
    learner: SimulatedLearner
    announced: dict[str, Announced]
    start: Callable[[str], Awaitable[None]]
    """Another life of this worker, empty, in place of the one that `announced` and the fields above name."""

    @property
    def rollout(self) -> SimulatedRollout:
        return self.rollouts[0]

    @property
    def reward(self) -> SimulatedReward:
        return self.rewards[0]

    async def kill(self, worker_id: str) -> None:
        """As kill -9: the server is gone, and its announcement stays until another life of it begins."""
        await self.announced[worker_id].server.stop(0.0)


@asynccontextmanager
async def simulated_services(
    nats_url: str,
    run_id: str,
    *,
    rollouts: int = 1,
    rewards: int = 1,
    rollout_state: int = tenant_pb2.WORKER_STATE_STALE,
) -> AsyncIterator[Simulation]:
    """rollout-0 …, reward-0 … and learner-0, up and announced."""
    bus = await Bus.connect(nats_url, "simulation")
    tokenizer = make_tokenizer()
    encode = render_and_encode(tokenizer)
    letters = [tokenizer.token_to_id(c) for c in "abcdef0123456789"]
    announced: dict[str, Announced] = {}

    def announce(worker_id: str, kind: Any, state: Callable[[], Any]) -> Server:
        announced[worker_id] = Announced(bus, run_id, worker_id, kind, state)
        return announced[worker_id].server

    def make_rollout(worker_id: str) -> SimulatedRollout:
        engine = SimulatedRollout(worker_id, encode, letters, tokenizer.token_to_id(EOS))
        engine.state = rollout_state
        server = announce(worker_id, events_pb2.WORKER_KIND_ROLLOUT, lambda: engine.state)
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, engine, ROLLOUT)
        server.add(tenant_pb2_grpc.add_TenantServiceServicer_to_server, engine, TENANT)
        return engine

    def make_learner() -> SimulatedLearner:
        learner = SimulatedLearner("learner-0", encode)
        server = announce("learner-0", events_pb2.WORKER_KIND_LEARNER, lambda: learner.state)
        server.add(learner_pb2_grpc.add_LearnerServiceServicer_to_server, learner, LEARNER)
        server.add(tenant_pb2_grpc.add_TenantServiceServicer_to_server, learner, TENANT)
        return learner

    def make_reward(worker_id: str) -> SimulatedReward:
        reward = SimulatedReward(worker_id)
        server = announce(worker_id, events_pb2.WORKER_KIND_REWARD, lambda: tenant_pb2.WORKER_STATE_READY)
        server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, reward, REWARD)
        return reward

    async def start(worker_id: str) -> None:
        await announced[worker_id].fall_silent()
        if worker_id.startswith("rollout-"):
            simulation.rollouts[int(worker_id.removeprefix("rollout-"))] = make_rollout(worker_id)
        elif worker_id == "learner-0":
            simulation.learner = make_learner()
        else:
            simulation.rewards[int(worker_id.removeprefix("reward-"))] = make_reward(worker_id)
        every.append(announced[worker_id])
        await announced[worker_id].start()

    engines = [make_rollout(f"rollout-{n}") for n in range(rollouts)]
    learner = make_learner()
    scorers = [make_reward(f"reward-{n}") for n in range(rewards)]
    simulation = Simulation(engines, scorers, learner, announced, start)
    every = list(announced.values())
    try:
        for one in every:
            await one.start()
        yield simulation
    finally:
        for one in every:
            await one.die()
        await bus.close()


async def _well() -> str | None:
    return None
