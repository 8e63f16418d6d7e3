"""A real learner service, killed and started again: it goes on from its checkpoint as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import checkpoint_pb2, learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.config import ProcessConfig, dump, parse
from services.common.errors import AntiphonError, Conflict, InvalidRequest, Unavailable
from services.common.processes import spawn
from services.learner import checkpoint
from services.learner.config import LearnerConfig
from tests.faults.dying_learner import MODULE
from tests.tiny.models import make_tiny_model
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.test_learner_ranks import alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS = 120.0
WORK_SECONDS = 60.0
GONE_SECONDS = 10.0


class Service:
    """One life of the service."""

    def __init__(self, process: asyncio.subprocess.Process, peer: Peer) -> None:
        self.process = process
        self.peer = peer
        self.stub = learner_pb2_grpc.LearnerServiceStub(peer.channel)
        self.tenant = tenant_pb2_grpc.TenantServiceStub(peer.channel)

    async def result(self, method: Any, request: Any) -> Any:
        messages = [m async for m in self.peer.stream(method, request, deadline_seconds=WORK_SECONDS)]
        return messages[-1].result

    async def step(self, number: int) -> learner_pb2.StepResult:
        """Step `number` of the run; its batch and its two Updates are always the same."""
        batch = make_batch(60, seed=number)
        header = make_header(number, batch, [[0, 1, 2, 3], [6, 5, 4]])
        requests = [learner_pb2.TrainStepRequest(header=header)]
        requests += [learner_pb2.TrainStepRequest(trajectory=row) for row in batch]
        return await self.result(self.stub.TrainStep, iter(requests))

    async def save(self, path: Path, version: int, request_id: str) -> learner_pb2.SaveResult:
        request = learner_pb2.SaveRequest(request_id=request_id, path=str(path), policy_version=version)
        return await self.result(self.stub.Save, request)

    async def load(self, path: Path) -> learner_pb2.LoadResult:
        return await self.result(self.stub.Load, learner_pb2.LoadRequest(request_id="l", path=str(path)))

    async def pids(self) -> list[int]:
        state = await self.peer.call(self.tenant.GetState, tenant_pb2.GetStateRequest(), deadline_seconds=WORK_SECONDS)
        return list(state.pids)

    async def kill(self) -> None:
        """SIGKILL of the parent: the ranks go with it."""
        pids = await self.pids()
        self.process.kill()
        await self.process.wait()
        async with asyncio.timeout(GONE_SECONDS):
            while any(alive(pid) for pid in pids):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Lives:
    """Starts the service again and again, on the same model and with the same settings."""

    def __init__(self, folder: Path, nats: Any) -> None:
        self.folder = folder
        self._nats = nats
        self._model = make_tiny_model(folder / "model")
        self._count = 0

    @asynccontextmanager
    async def life(self, *, ranks: int, dies: str = "") -> AsyncIterator[Service]:
        self._count += 1
        run_id = f"test-{self._count}"
        tree = {
            "service": {
                "run_id": run_id,
                "worker_id": "learner",
                "run_dir": str(self.folder),
                "nats_url": self._nats.url,
                "nats_monitor_url": self._nats.monitor_url,
            },
            "model": {"path": str(self._model), "dtype": "float32"},
            "settings": {
                "ranks": ranks,
                "micro_batch_tokens": 64,
                "failed_linger_seconds": 1.0,
                "optimizer": {"learning_rate": 0.01, "warmup_updates": 8, "weight_decay": 0.1},
            },
        }
        config = self.folder / "learner.yaml"
        config.write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
        command = [sys.executable, "-m", MODULE, "--config", str(config)]
        process = await spawn(command, environment={**os.environ, "DIES": dies}, log=self.folder / "learner.log")
        bus = await Bus.connect(self._nats.url, "test")
        registry = Registry(bus, run_id)
        listening = asyncio.create_task(registry.run())

        def ready() -> bool:
            found = registry.alive(events_pb2.WORKER_KIND_LEARNER)
            return bool(found) and found[0].state == tenant_pb2.WORKER_STATE_READY

        peer = None
        try:
            assert await registry.wait_for(ready, START_SECONDS), (self.folder / "learner.log").read_text()
            peer = Peer("learner", registry.alive(events_pb2.WORKER_KIND_LEARNER)[0].address)
            yield Service(process, peer)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            if peer is not None:
                await peer.close()
            await bus.close()
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
def lives(tmp_path: Path, nats_server: Any) -> Lives:
    return Lives(tmp_path, nats_server)


def manifest_of(path: Path) -> checkpoint_pb2.CheckpointManifest:
    manifest, _ = checkpoint.read_manifest(path)
    checkpoint.check_contents(path, manifest.files)
    return manifest


async def test_ten_steps_are_five_and_a_kill_and_five(lives):
    """Two ranks, bit by bit; then the same five on one rank and on four, to rounding. No Step is applied twice."""
    five, ten = lives.folder / "five", lives.folder / "ten"
    async with lives.life(ranks=2) as service:
        results = [await service.step(number) for number in range(1, 6)]
        saved = await service.save(five, 5, "five")
        results += [await service.step(number) for number in range(6, 11)]
        await service.save(ten, 10, "ten")
        await service.kill()
    rates = [metrics.learning_rate for result in results for metrics in result.updates]
    assert rates == pytest.approx([0.01 * min(k, 8) / 8 for k in range(1, 21)])
    async with lives.life(ranks=2) as service:
        assert (await service.load(five)).policy == saved.policy
        assert await service.step(4) == results[3] and await service.step(5) == results[4]
        with pytest.raises(Conflict, match="expected 6"):
            await service.step(7)
        again = [await service.step(number) for number in range(6, 11)]
        assert [list(result.updates) for result in again] == [list(result.updates) for result in results[5:]]
        await service.save(lives.folder / "ten-again", 10, "ten-again")
        await service.kill()
    first, second = manifest_of(ten), manifest_of(lives.folder / "ten-again")
    assert second.files == first.files  # masters, moments, random numbers
    assert (second.policy, second.position) == (first.policy, first.position)
    assert [step.result.step_id for step in second.steps] == list(range(1, 11))

    for ranks in (1, 4):
        path = lives.folder / f"by-{ranks}"
        async with lives.life(ranks=ranks) as service:
            loaded = await service.load(five)
            # Computed from other slices than before, and the same: every weight is where it was.
            assert loaded.policy == saved.policy
            assert f"written by 2 ranks and cut anew for {ranks}" in loaded.parts[0].detail
            await service.save(path, 5, "five")
            for number in range(6, 11):
                for mine, theirs in zip((await service.step(number)).updates, results[number - 1].updates, strict=True):
                    for name in ("loss", "gradient_norm", "entropy", "ratio_mean", "learning_rate"):
                        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=2e-3, abs=1e-6), name
            await service.kill()
        assert manifest_of(path).policy == saved.policy and len(manifest_of(path).files) == ranks
    async with lives.life(ranks=2) as service:  # what four ranks cut, two put together bit by bit
        assert (await service.load(lives.folder / "by-4")).policy == saved.policy
        again = [await service.step(number) for number in range(6, 11)]
        assert [list(result.updates) for result in again] == [list(result.updates) for result in results[5:]]


async def test_killed_in_the_middle_of_a_save_the_older_checkpoint_is_there(lives):
    """At four points, the parent or a rank; each time the next life loads what is whole, trains and saves."""
    whole = lives.folder / "checkpoints" / "v0"
    whole.parent.mkdir()
    async with lives.life(ranks=2) as service:
        await service.save(whole, 0, "v0")
        await service.kill()
    version = 0
    for dies, is_there in (
        ("rank1 open .partial/rank0001-0000.safetensors", False),
        ("parent open .partial/manifest.json", False),
        ("parent os.rename .partial", False),
        ("parent open checkpoints", True),  # renamed; the folder above it is about to be synced
    ):
        new = whole.parent / f"v{version + 1}"
        async with lives.life(ranks=2, dies=dies) as service:
            assert (await service.load(whole)).next_step_id == version + 1
            await service.step(version + 1)
            with pytest.raises(AntiphonError) as caught:
                await service.save(new, version + 1, new.name)
            assert isinstance(caught.value, Unavailable), dies
            if dies.startswith("rank1"):
                assert "rank 1" in str(caught.value) and "SIGKILL" in str(caught.value)
            assert await asyncio.wait_for(service.process.wait(), GONE_SECONDS) in (1, -9)
        assert new.exists() == is_there, dies
        manifest_of(whole)
        async with lives.life(ranks=2) as service:
            if is_there:  # the answer was lost: who asks again hears of it, at version 0 still
                assert (await service.save(new, version + 1, new.name)).policy == manifest_of(new).policy
            await service.load(whole)
            await service.step(version + 1)
            if not is_there:
                await service.save(new, version + 1, new.name)
            assert [p.name for p in new.parent.iterdir() if p.name.startswith(".")] == [], dies
            await service.kill()
        whole, version = new, version + 1
        assert manifest_of(whole).policy.version == version


async def test_a_full_disk_costs_one_save_and_nothing_else(lives):
    """The system refuses what a rank, or the parent, writes beyond a size; then there is room again."""
    async with lives.life(ranks=2) as service:
        await service.step(1)
        await service.save(lives.folder / "old", 1, "old")
        before = sorted(p.name for p in lives.folder.iterdir())
        parent, *ranks = await service.pids()
        for pid, limit, what in (
            (ranks[1], 100_000, "rank 1 cannot write its slices"),
            (parent, 100, "File too large"),
        ):
            usual = resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with pytest.raises(Unavailable, match=what):
                await service.save(lives.folder / "new", 1, "new")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)
            assert sorted(p.name for p in lives.folder.iterdir()) == before
        await service.step(2)
        saved = await service.save(lives.folder / "new", 2, "newer")
        assert manifest_of(lives.folder / "new").policy == saved.policy
        with pytest.raises(InvalidRequest, match="there is no folder"):
            await service.save(lives.folder / "old" / "manifest.json" / "x", 2, "s")
        assert (await service.load(lives.folder / "old")).next_step_id == 2
