"""The supervisor's word on the log of grants: after the worker and its children, and never a reason to hang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.launch import exits
from services.cli.launch.local import NATS, LocalLauncher
from services.cli.recipe import read_recipe
from services.common.bus import Bus
from services.common.config import ServiceConfig
from services.common.grants import ClaimsState, NodeState, TenantId
from services.common.handoff_log import CLAIMS_SUBJECT, SubjectLog, node_subject
from services.common.handoff_stream import JetStreamStore
from services.common.processes import INSTANCE_ID_VARIABLE, RUN_ID_VARIABLE, spawn
from tests.contract.echo_service import until
from tests.unit.cli.standins.recipe import write_recipe

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A child in a session of its own that outlives its parent a little, as one does that gives back a GPU's memory.
WITH_CHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1.5)'], start_new_session=True)\n"
    "time.sleep(60)",
]
# Not impressed by SIGTERM, as an engine in the middle of a kernel, and with a child that nothing ends.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "time.sleep(60)",
]


def sharing(url: str, worker_id: str = "rollout-0", **changes: Any) -> ServiceConfig:
    arguments = {"run_id": "red", "run_dir": Path("unused"), "nats_url": url, "node": "host-1", "shares_gpus": True}
    return ServiceConfig(worker_id=worker_id, **{**arguments, **changes})


def tenant(service: ServiceConfig) -> TenantId:
    return TenantId(service.run_id, service.worker_id, service.instance_id)


class Logs:
    """What is on the stream."""

    def __init__(self, store: JetStreamStore) -> None:
        self._node = SubjectLog(store, node_subject("host-1"), NodeState, NodeState.apply)
        self.claims = SubjectLog(store, CLAIMS_SUBJECT, ClaimsState, ClaimsState.apply)

    async def exited(self) -> tuple[TenantId, ...]:
        return (await self._node.refresh()).exited


@pytest.fixture
async def logs(nats_server: Any) -> AsyncIterator[Logs]:
    bus = await Bus.connect(nats_server.url, "test")
    yield Logs(await JetStreamStore.open(bus))
    await bus.close()


async def test_the_end_is_told_when_the_children_have_ended_too(logs: Logs, nats_server: Any, tmp_path: Path) -> None:
    service = sharing(nats_server.url)
    environment = {**os.environ, INSTANCE_ID_VARIABLE: service.instance_id}
    process = await spawn(WITH_CHILD, environment=environment, log=tmp_path / "log")
    await until(lambda: len(exits.find_processes(service.instance_id, INSTANCE_ID_VARIABLE)) == 2)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    code = await process.wait()
    telling = asyncio.create_task(exits.tell_exited(service, process.pid, code, coordinator=False))
    while exits.find_processes(service.instance_id, INSTANCE_ID_VARIABLE):
        assert await logs.exited() == ()
        await asyncio.sleep(0.05)
    assert time.monotonic() - began < 10
    await asyncio.wait_for(telling, 5)
    assert await logs.exited() == (tenant(service),)


async def test_the_end_of_a_coordinator_ends_its_claim(logs: Logs, nats_server: Any) -> None:
    service = sharing(nats_server.url, "coordinator-0")
    claims = await logs.claims.refresh()
    claim = exits.handoff_pb2.HandoffEntry(claim=claims.claim("red", service.instance_id, ["host-1"]))
    await logs.claims.append(claim, claims)
    assert (await logs.claims.refresh()).of("red")
    await exits.tell_exited(service, 1, 0, coordinator=True)
    assert (await logs.claims.refresh()).of("red") is None
    assert await logs.exited() == (tenant(service),)


async def test_where_no_gpu_is_shared_nothing_is_done() -> None:
    service = sharing("nats://127.0.0.1:1", shares_gpus=False)
    await asyncio.wait_for(exits.tell_exited(service, 1, 0, coordinator=False), 0.1)


async def launched(tmp_path: Path, url: str, command: list[str] = SLEEP) -> tuple[LocalLauncher, ServiceConfig]:
    recipe = read_recipe(write_recipe(tmp_path), [f"nats.url={url}"], tmp_path)
    launcher = LocalLauncher(recipe, tmp_path / "run", "red")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    service = sharing(url)
    environment = {**os.environ, RUN_ID_VARIABLE: "red", INSTANCE_ID_VARIABLE: service.instance_id}
    await launcher._spawn("rollout-0", command, environment, service)
    return launcher, service


async def test_the_launcher_tells_the_end_of_a_worker_that_died(logs: Logs, nats_server: Any, tmp_path: Path) -> None:
    launcher, service = await launched(tmp_path, nats_server.url)
    (pid,) = launcher.owners()
    os.kill(pid, signal.SIGKILL)

    async def told() -> bool:
        return await logs.exited() == (tenant(service),)

    await until(told)
    await launcher.stop(1.0)


async def test_the_launcher_tells_the_end_of_a_worker_that_it_stopped(
    logs: Logs, nats_server: Any, tmp_path: Path
) -> None:
    launcher, service = await launched(tmp_path, nats_server.url)
    await launcher.stop(5.0)
    assert await logs.exited() == (tenant(service),)


@pytest.mark.parametrize("how", ["outlasts the grace", "second Ctrl-C"])
async def test_the_launcher_tells_the_end_of_a_worker_that_it_killed(
    logs: Logs, nats_server: Any, tmp_path: Path, how: str
) -> None:
    launcher, service = await launched(tmp_path, nats_server.url, STUBBORN)
    await until(lambda: len(exits.find_processes(service.instance_id, INSTANCE_ID_VARIABLE)) == 2)
    if how == "second Ctrl-C":
        await launcher.kill()
    else:
        await launcher.stop(0.3)
    assert await logs.exited() == (tenant(service),)
    assert exits.find_processes("red") == []


async def test_the_end_of_a_worker_that_was_killed_is_told_before_the_runs_own_nats_ends(
    nats_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = await launched(tmp_path, nats_server.url, STUBBORN)
    (worker,) = launcher.owners()
    await launcher._spawn(NATS, SLEEP, {**os.environ, RUN_ID_VARIABLE: "red"})
    told: list[bool] = []

    async def tell(service: ServiceConfig, pid: int, exit_code: int, *, coordinator: bool) -> None:
        await asyncio.sleep(0.5)
        told.append(launcher.alive(NATS) and pid == worker)

    monkeypatch.setattr(exits, "tell_exited", tell)
    await launcher.kill()
    assert told == [True]
    assert launcher.owners() == {}


async def test_nats_that_is_gone_does_not_hold_up_a_stop(nats_server: Any, tmp_path: Path) -> None:
    launcher, _ = await launched(tmp_path, nats_server.url)
    nats_server.kill()
    began = time.monotonic()
    await launcher.stop(5.0)
    assert time.monotonic() - began < exits.TELL_SECONDS + 3.0
