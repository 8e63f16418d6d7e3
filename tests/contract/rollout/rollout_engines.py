"""Rollout workers with different engines behind the same channel: without a model, embedded, and vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import transfer_pb2
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId, Trajectory

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.server import Server
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.rollout import Rollout
from services.rollout.start import start_engine
from services.rollout.states import STARTING
from tests.contract.rollout.rollout_guard import Guard
from tests.simulated.policy import policy
from tests.simulated.rollout import SimulatedRollout
from tests.simulated.services import ROLLOUT, TENANT, render_and_encode
from tests.tiny.models import CHARACTERS, EOS, make_tiny_model, make_tokenizer

DEADLINE = 60.0
PROBE = [1, 40, 41, 42, 50, 60, 12, 33, 7, 80]
TOKENIZER = make_tokenizer()


def decode(token_ids: Sequence[int]) -> str:
    """Special tokens included."""
    text: str = TOKENIZER.decode(list(token_ids), skip_special_tokens=False)
    return text


@dataclass
class Worker:
    """A rollout worker at the other end of a channel."""

    peer: Peer
    rollout: Rollout | None = None
    """Of a real one."""
    model: Any = None
    """What the learner would hold."""
    epoch: int = 0
    running: asyncio.Task[None] | None = None
    counter: int = field(default=0)

    async def call(self, method: str, request: Any) -> Any:
        stub = rollout_pb2_grpc.RolloutServiceStub(self.peer.channel)
        return await self.peer.call(getattr(stub, method), request, deadline_seconds=DEADLINE)

    async def state(self) -> tenant_pb2.GetStateResponse:
        stub = tenant_pb2_grpc.TenantServiceStub(self.peer.channel)
        return await self.peer.call(stub.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=DEADLINE)

    def request(
        self,
        *,
        prompt: Sequence[int] = (1, 20, 21, 22),
        samples: int = 3,
        temperature: float = 1.0,
        max_tokens: int = 12,
        stop: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        row: int = 0,
        **fields: Any,
    ) -> rollout_pb2.GenerateRequest:
        self.counter += 1
        return rollout_pb2.GenerateRequest(
            **{
                "request_id": f"request-{self.counter}",
                "prompt_id": PromptId(dataset="train", row=row),
                "prompt_token_ids": prompt,
                "samples": samples,
                "run_seed": 7,
                "sampling": rollout_pb2.Sampling(
                    temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop, stop_strings=stop_strings
                ),
                **fields,
            }
        )

    async def generate(self, request: rollout_pb2.GenerateRequest) -> list[Trajectory]:
        """By sample number."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self.peer.channel)
        stream = self.peer.stream(stub.Generate, request, deadline_seconds=DEADLINE)
        return sorted([answer.trajectory async for answer in stream], key=lambda t: t.sample_number)

    async def ask(self, **fields: Any) -> list[Trajectory]:
        return await self.generate(self.request(**fields))

    async def publish(self, version: int) -> rollout_pb2.CommitUpdateResponse:
        """A whole publication of the model, by a new rank in a new epoch."""
        self.epoch += 1
        if self.model is None:
            manifest = transfer_pb2.TransferManifest(epoch=self.epoch, receiver_ranks=1)
            await self.call("JoinTransfer", rollout_pb2.JoinTransferRequest(request_id="j", manifest=manifest))
            await self._begin(version)
            return await self._commit(policy(version), [-1.0] * (len(PROBE) - 1))
        from tests.system import vllm_publications as learner

        sender = learner.ThreadSender(self.model, self.epoch)
        connected = asyncio.create_task(asyncio.to_thread(sender.connect))
        join = rollout_pb2.JoinTransferRequest(request_id=f"j{self.epoch}", manifest=sender.manifest)
        answer = await self.call("JoinTransfer", join)
        assert not (answer.unknown_tensors or answer.missing_tensors or answer.differing_tensors), answer
        await connected
        await self._begin(version)
        report = await asyncio.to_thread(sender.send)
        said = learner.token_logprobs(self.model, PROBE)
        return await self._commit(Policy(version=version, digest=report.digest), said)

    async def _begin(self, version: int) -> None:
        begin = rollout_pb2.BeginUpdateRequest(
            request_id=f"b{self.epoch}", epoch=self.epoch, policy_version=version, deadline_seconds=20
        )
        await self.call("BeginUpdate", begin)

    async def _commit(self, published: Policy, logprobs: list[float]) -> rollout_pb2.CommitUpdateResponse:
        commit = rollout_pb2.CommitUpdateRequest(
            request_id=f"c{self.epoch}",
            policy=published,
            probe_token_ids=PROBE,
            probe_logprobs=logprobs,
            probe_tolerance=1e-3,
        )
        return await self.call("CommitUpdate", commit)


@asynccontextmanager
async def simulated_worker(worker_id: str = "rollout-0") -> AsyncIterator[Worker]:
    letters = [TOKENIZER.token_to_id(character) for character in CHARACTERS[:36]]
    encode = render_and_encode(TOKENIZER)
    engine = SimulatedRollout(worker_id, encode, letters, TOKENIZER.token_to_id(EOS), decode)
    server = Server("127.0.0.1", 0, _healthy)
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, engine, ROLLOUT)
    server.add(tenant_pb2_grpc.add_TenantServiceServicer_to_server, engine, TENANT)
    await server.start()
    peer = Peer(worker_id, server.address)
    try:
        yield Worker(peer)
    finally:
        await peer.close()
        await server.stop()


@asynccontextmanager
async def real_worker(
    folder: Path, engine: str, worker_id: str = "rollout-0", *, seed: int = 0, **settings: Any
) -> AsyncIterator[Worker]:
    """With a tiny model of random weights that no publication has filled yet."""
    import torch
    import transformers

    path = make_tiny_model(folder / f"model-{worker_id}", seed=seed)
    # A model folder's own sampling defaults must have no say.
    defaults = {"do_sample": True, "temperature": 0.3, "top_k": 3, "repetition_penalty": 1.5, "eos_token_id": [2, 9]}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    settings = {"engine": engine, "kv_cache_gib": 0.125, "max_running": 32, "threads": 1, **settings}
    process = ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id=worker_id, run_dir=folder, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path=str(path), dtype="float32"),
        settings=RolloutConfig(
            **{"engine": engine, "kv_cache_gib": 0.125, "max_running": 32, "threads": 1, **settings}
        ),
    )
    rollout = Rollout(process, start_engine)
    server = Server("127.0.0.1", 0, rollout.health_check)
    service.add_to(server, rollout, Guard())  # type: ignore[arg-type]
    await server.start()
    running = asyncio.create_task(rollout.run())
    async with asyncio.timeout(200):
        while rollout.life.state == STARTING:
            changed = asyncio.create_task(rollout.life.wait_change())
            await asyncio.wait({changed, running}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
    if running.done():
        running.result()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    peer = Peer(worker_id, server.address)
    try:
        yield Worker(peer, rollout, model, running=running)
    finally:
        await peer.close()
        running.cancel()
        await rollout.drain()
        await server.stop()


async def _healthy() -> str | None:
    return None
