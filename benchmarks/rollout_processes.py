"""A rollout worker for benchmarks: as a service with NATS beside it, or in this process behind the same gRPC server."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.cli.launch import nats_server
from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.processes import spawn
from services.common.server import Server
from services.common.tenancy import TenantGuard
from services.coordinator.clients import RolloutClient
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.rollout import Rollout
from services.rollout.vllm_engine import VllmEngine

RUN_ID = "benchmark"
WORKER_ID = "rollout-0"
START_SECONDS = 400.0  # CUDA graphs, cold


def process_config(
    model: ModelConfig, settings: RolloutConfig, folder: Path, *, nats_url: str = "nats://127.0.0.1:1", **fields: bool
) -> ProcessConfig[RolloutConfig]:
    own = ServiceConfig(run_id=RUN_ID, worker_id=WORKER_ID, run_dir=folder, nats_url=nats_url, **fields)
    return ProcessConfig[RolloutConfig](service=own, model=model, settings=settings)


@asynccontextmanager
async def as_service(model: ModelConfig, settings: RolloutConfig, folder: Path) -> AsyncIterator[RolloutClient]:
    """`python -m services.rollout` once its engine is up; all processes are gone afterwards. Logs are in the folder."""
    nats_folder = folder / "nats"
    nats_folder.mkdir(parents=True)
    log = folder / "nats.log"
    command = [nats_server.find_binary(), "-c", str(nats_server.write_config(nats_folder))]
    nats = await spawn(command, environment=dict(os.environ), log=log)
    worker = None
    try:
        url, _ = await nats_server.wait_until_listening(nats_folder, nats, log)
        path = folder / "rollout.yaml"
        path.write_text(dump(process_config(model, settings, folder, nats_url=url)))
        command = [sys.executable, "-m", "services.rollout", "--config", str(path)]
        worker = await spawn(command, environment=dict(os.environ), log=folder / "rollout.log")
        bus = await Bus.connect(url, "benchmark")
        registry = Registry(bus, RUN_ID)
        listening = asyncio.create_task(registry.run())
        try:
            address = await _stale_worker(registry, worker, folder / "rollout.log")
        finally:
            listening.cancel()
            await bus.close()
        client = RolloutClient(WORKER_ID, "", address)
        yield client
        await client.close()
    except BaseException:
        print((await asyncio.to_thread((folder / "rollout.log").read_text, errors="replace"))[-5000:], flush=True)
        raise
    finally:
        for process in (worker, nats):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def in_this_process(process: ProcessConfig[RolloutConfig]) -> AsyncIterator[tuple[RolloutClient, Rollout]]:
    """The same domain objects and the same gRPC server, without NATS: its guard lets every call through."""
    rollout = Rollout(process, VllmEngine.start)
    server = Server("127.0.0.1", 0, rollout.health_check)
    service.add_to(server, rollout, TenantGuard(process.service, shares_gpus=False))
    await server.start()
    running = asyncio.create_task(rollout.run())
    client = RolloutClient(WORKER_ID, "", server.address)
    try:
        async with asyncio.timeout(START_SECONDS):
            while rollout.life.state != tenant_pb2.WORKER_STATE_STALE:
                changed = asyncio.create_task(rollout.life.wait_change())
                await asyncio.wait({changed, running}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
        yield client, rollout
    finally:
        await client.close()
        await rollout.drain()
        running.cancel()
        await asyncio.wait({running})
        await server.stop()


async def _stale_worker(registry: Registry, worker: asyncio.subprocess.Process, log: Path) -> str:
    """The worker's address once its engine is up: it waits for a publication then."""
    found: list[str] = []

    def is_up() -> bool:
        found[:] = [
            announced.address
            for announced in registry.alive(events_pb2.WORKER_KIND_ROLLOUT)
            if announced.state == tenant_pb2.WORKER_STATE_STALE
        ]
        return bool(found) or worker.returncode is not None

    begin = time.monotonic()
    if not await registry.wait_for(is_up, START_SECONDS) or not found:
        raise RuntimeError(f"the service is not up after {time.monotonic() - begin:.0f} s; its log is {log}")
    return found[0]
