"""What is started again, how often and when; and that nothing of the old life is left then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.launch import restarts
from services.cli.launch.local import LocalLauncher
from services.cli.launch.restarts import Restarts
from services.cli.recipe import read_recipe
from services.cli.run_processes import find_processes, kill_processes
from services.common.bus import Bus
from services.common.config import ServiceConfig
from services.common.processes import INSTANCE_ID_VARIABLE, RUN_ID_VARIABLE
from tests.contract.echo_service import until
from tests.unit.cli.standins.recipe import write_recipe

# With a child in a session of its own, which nothing ends.
WITH_CHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "time.sleep(60)",
]
FAILS = [sys.executable, "-c", "raise SystemExit('no such weights')"]
WRONG = [sys.executable, "-c", "raise SystemExit(2)"]


def test_each_has_its_own_budget_and_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 1.0)
    budget = Restarts(4)
    taken = []
    while budget.allowed("learner-0", -9, begun=False):
        taken.append(budget.take("learner-0"))
    assert taken == [1.0, 2.0, 4.0, 4.0]
    assert budget.describe("learner-0") == "4 of 4"
    assert budget.allowed("rollout-0", -9, begun=False)
    assert not Restarts(0).allowed("rollout-0", -9, begun=True)


@pytest.mark.parametrize(
    ("code", "begun", "by_itself", "allowed"),
    [
        (-9, False, False, True),  # killed
        (-11, True, True, True),
        (1, False, False, False),  # a failure at the start would only come again
        (1, True, False, True),
        (0, True, False, True),
        (2, True, False, False),  # its configuration is wrong
        (1, True, True, False),  # a coordinator whose run failed
    ],
)
def test_what_ended_by_itself_is_started_again_where_it_may_help(
    code: int, begun: bool, by_itself: bool, allowed: bool
) -> None:
    assert Restarts(1).allowed("one", code, begun=begun, ends_by_itself=by_itself) is allowed


class Launched:
    """A launcher with one process of ours in place of its workers."""

    def __init__(self, folder: Path, command: list[str], restarts_allowed: int) -> None:
        recipe = read_recipe(write_recipe(folder), ["nats.url=nats://127.0.0.1:1"], folder)
        self.told: list[str] = []
        self.lives: list[ServiceConfig] = []
        self.launcher = LocalLauncher(
            recipe, folder / "run", "green", restarts=restarts_allowed, on_restart=self.told.append
        )
        self._folder = folder
        self._command = command
        (folder / "run" / "logs").mkdir(parents=True)

    async def start(self) -> None:
        service = ServiceConfig(run_id="green", worker_id="rollout-0", run_dir=self._folder, nats_url="unused")
        self.lives.append(service)
        environment = {**os.environ, RUN_ID_VARIABLE: "green", INSTANCE_ID_VARIABLE: service.instance_id}
        await self.launcher._spawn("rollout-0", self._command, environment, service, self.start)

    def pids(self, life: int) -> list[int]:
        return find_processes(self.lives[life].instance_id, INSTANCE_ID_VARIABLE)


@pytest.fixture(autouse=True)
async def nothing_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.05)
    yield
    assert kill_processes("green", 5.0) == []


async def test_a_worker_that_was_killed_is_another_life_and_nothing_of_the_old_one_is_left(tmp_path: Path) -> None:
    launched = Launched(tmp_path, WITH_CHILD, 1)
    await launched.start()
    await until(lambda: len(launched.pids(0)) == 2)
    (pid,) = launched.launcher.owners()
    os.kill(pid, signal.SIGKILL)
    await until(
        lambda: len(launched.lives) == 2 and len(launched.pids(1)) == 2 and len(launched.launcher.owners()) == 1
    )
    assert launched.pids(0) == []
    assert launched.told == ["rollout-0 ended unexpectedly (killed by SIGKILL); started again in 0 s, restart 1 of 1"]
    (pid,) = launched.launcher.owners()
    os.kill(pid, signal.SIGKILL)
    death = await asyncio.wait_for(launched.launcher.first_death(), 5.0)
    assert "(killed by SIGKILL), after it was started again 1 times" in death.describe()
    await launched.launcher.stop(1.0)
    assert find_processes("green") == []


@pytest.mark.parametrize(("command", "begun", "lives"), [(FAILS, False, 1), (FAILS, True, 3), (WRONG, True, 1)])
async def test_what_fails_by_itself_ends_the_run_with_its_words(
    tmp_path: Path, command: list[str], begun: bool, lives: int
) -> None:
    launched = Launched(tmp_path, command, 2)
    launched.launcher.begun = begun
    await launched.start()
    death = await asyncio.wait_for(launched.launcher.first_death(), 10.0)
    assert len(launched.lives) == lives
    assert ("no such weights" in death.describe()) is (command is FAILS)
    await launched.launcher.stop(1.0)


async def test_a_stop_starts_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 30.0)
    launched = Launched(tmp_path, WITH_CHILD, 3)
    await launched.start()
    (pid,) = launched.launcher.owners()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: len(launched.told) == 1)
    began = time.monotonic()
    await launched.launcher.stop(1.0)
    assert time.monotonic() - began < 5.0
    assert len(launched.lives) == 1 and find_processes("green") == []


async def test_the_learner_has_its_grace_for_a_checkpoint(tmp_path: Path) -> None:
    """It ends later than the others may."""
    ends_after = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(float(sys.argv[1]))\n    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    recipe = read_recipe(write_recipe(tmp_path), ["nats.url=nats://127.0.0.1:1"], tmp_path)
    launcher = LocalLauncher(recipe, tmp_path / "run", "green")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    environment = {**os.environ, RUN_ID_VARIABLE: "green"}
    processes = [
        await launcher._spawn(worker_id, [sys.executable, "-c", ends_after, seconds], environment)
        for worker_id, seconds in (("learner-0", "0.8"), ("reward-0", "30"))
    ]
    names = ("learner-0", "reward-0")
    await until(lambda: all("ready" in launcher.log(name).read_text() for name in names), 20.0)
    await launcher.stop(0.3)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]


@pytest.mark.slow
async def test_nats_comes_back_on_its_ports_with_what_was_stored(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path), [], tmp_path)
    launcher = LocalLauncher(recipe, tmp_path / "run", "green", restarts=1)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    await launcher._start_nats()
    url = launcher.nats_url
    bus = await Bus.connect(url, "test", launcher.nats_monitor_url)
    try:
        await (await bus.bucket("kept", 60.0)).put("key", b"value")
        (pid,) = launcher.owners()
        os.kill(pid, signal.SIGKILL)

        async def kept() -> bool:
            try:
                return (await (await bus.bucket("kept", 60.0)).get("key")).value == b"value"
            except Exception:
                return False

        await until(lambda: list(launcher.owners()) not in ([pid], []))
        await until(kept)
        assert launcher.nats_url == url
    finally:
        await bus.close()
        await launcher.stop(1.0)
