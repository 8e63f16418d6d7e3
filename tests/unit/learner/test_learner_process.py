"""The learner as a process of a run: announced, healthy, then without a rank; SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.config import ProcessConfig, dump, parse
from services.common.errors import Unavailable
from services.common.processes import spawn
from services.learner import checkpoint
from services.learner.config import LearnerConfig
from tests.unit.learner.test_learner_ranks import alive

DEADLINE_SECONDS = 30.0
LINGER_SECONDS = 2.0


class Running:
    """The process, what it announces, and a channel to it."""

    def __init__(self, process, registry: Registry) -> None:
        self.process = process
        self.registry = registry
        self.peer: Peer | None = None

    def announced(self) -> events_pb2.WorkerAnnouncement | None:
        found = self.registry.alive(events_pb2.WORKER_KIND_LEARNER)
        return found[0] if found else None

    async def until_state(self, state) -> None:
        def there() -> bool:
            announcement = self.announced()
            return announcement is not None and announcement.state == state

        assert await self.registry.wait_for(there, DEADLINE_SECONDS), self.announced()

    async def state(self) -> tenant_pb2.GetStateResponse:
        stub = tenant_pb2_grpc.TenantServiceStub(self.peer.channel)
        return await self.peer.call(stub.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=5)

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.peer.channel)
        answer = await self.peer.call(stub.Check, health_pb2.HealthCheckRequest(), deadline_seconds=5)
        return answer.status

    async def encode(self, **orders: str) -> list[int]:
        messages = [chat_pb2.ChatMessage(role=who.removeprefix("rank"), content=what) for who, what in orders.items()]
        request = learner_pb2.EncodeRequest(conversations=[chat_pb2.Conversation(messages=messages)])
        stub = learner_pb2_grpc.LearnerServiceStub(self.peer.channel)
        answer = await self.peer.call(stub.Encode, request, deadline_seconds=DEADLINE_SECONDS)
        return list(answer.encoded[0].ids)


@pytest.fixture
async def running(tmp_path, nats_server):
    tree = {
        "service": {
            "run_id": "test",
            "worker_id": "learner",
            "run_dir": str(tmp_path),
            "nats_url": nats_server.url,
            "nats_monitor_url": nats_server.monitor_url,
        },
        "model": {"path": "none"},
        "settings": {"ranks": 2, "failed_linger_seconds": LINGER_SECONDS},
    }
    config = tmp_path / "learner.yaml"
    config.write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
    command = [sys.executable, "-m", "tests.unit.learner.fake_learner", "--config", str(config)]
    process = await spawn(command, environment=os.environ, log=tmp_path / "learner.log")
    bus = await Bus.connect(nats_server.url, "test")
    registry = Registry(bus, "test")
    listening = asyncio.create_task(registry.run())
    made = Running(process, registry)
    try:
        await made.until_state(tenant_pb2.WORKER_STATE_READY)
        made.peer = Peer("learner", made.announced().address)
        yield made
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        if made.peer is not None:
            await made.peer.close()
        await bus.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_health(running: Running, status: int) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while await running.health() != status:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_a_lost_rank_is_said_everywhere_and_then_the_process_ends(running):
    assert await running.encode() == [100]
    await until_health(running, health_pb2.HealthCheckResponse.SERVING)
    state = await running.state()
    assert state.state == tenant_pb2.WORKER_STATE_READY
    assert state.pids[0] == running.process.pid and len(state.pids) == 3 and all(alive(pid) for pid in state.pids)

    with pytest.raises(Unavailable, match=r"rank 1 .* was killed by SIGKILL .*learner-rank1.log"):
        await running.encode(rank0="hang", rank1="killed")
    lost = time.monotonic()
    assert (await running.state()).state == tenant_pb2.WORKER_STATE_FAILED
    await running.until_state(tenant_pb2.WORKER_STATE_FAILED)
    await until_health(running, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await asyncio.wait_for(running.process.wait(), DEADLINE_SECONDS) == 1
    assert time.monotonic() - lost > 0.5 * LINGER_SECONDS
    assert not any(alive(pid) for pid in state.pids)


async def test_sigterm_ends_process_and_ranks(running):
    pids = list((await running.state()).pids)
    running.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running.process.wait(), DEADLINE_SECONDS) == 0
    assert not any(alive(pid) for pid in pids)
    assert await running.registry.wait_for(lambda: running.announced() is None, DEADLINE_SECONDS)


async def test_sigterm_in_the_middle_of_a_save_lets_it_come_to_its_end(running, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    stub = learner_pb2_grpc.LearnerServiceStub(running.peer.channel)
    request = learner_pb2.SaveRequest(request_id="s", path=str(tmp_path / "ck"))
    async for response in running.peer.stream(stub.Save, request, deadline_seconds=DEADLINE_SECONDS):
        if response.progress.phase == "write":
            break
    running.process.send_signal(signal.SIGTERM)
    await running.until_state(tenant_pb2.WORKER_STATE_STOPPING)
    assert running.process.returncode is None and not (tmp_path / "ck").exists()
    hold.unlink()
    assert await asyncio.wait_for(running.process.wait(), DEADLINE_SECONDS) == 0
    manifest, _ = checkpoint.read_manifest(tmp_path / "ck")
    checkpoint.check_contents(tmp_path / "ck", manifest.files)
    assert [file.name for file in manifest.files] == ["rank0", "rank1"]


def test_the_parent_imports_no_heavy_library():
    """Read by a process of its own: what `python -m services.learner` has loaded when its services are built."""
    import subprocess

    check = (
        "import services.learner.__main__, sys; "
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'vllm', 'datasets', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
