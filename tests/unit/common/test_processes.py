from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from services.common.processes import how_it_ended, spawn, stop
from tests.contract.echo_service import Echo, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd()}


def python(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


PARENT = """
    import asyncio, os, sys
    from services.common.processes import spawn

    async def main():
        child = await spawn(["sleep", "60"], environment=os.environ)
        print(child.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    yield process
    process.kill()
    process.wait(10)


def test_a_child_dies_with_a_killed_parent(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert running(child)
    assert os.getsid(child) == child, "a terminal's Ctrl-C would reach it"
    parent.kill()
    eventually(lambda: not running(child), 5)


@pytest.mark.parametrize("how", ["given", "multiprocessing"])
def test_a_child_whose_parent_is_dead_already_ends_at_once(how: str) -> None:
    text = """
        import multiprocessing, os, sys, time
        from services.common import processes

        def late(expected):
            parent = os.getppid()
            os.write(1, b"%d\\n" % os.getpid())
            while os.getppid() == parent:     # the death comes before die_with_parent
                time.sleep(0.01)
            processes.die_with_parent(expected)
            os.write(1, b"survived\\n")
            time.sleep(60)

        if __name__ == "__main__":
            expected = os.getpid() if sys.argv[1] == "given" else None
            multiprocessing.get_context("fork").Process(target=late, args=(expected,)).start()
            time.sleep(60)
    """
    process = subprocess.Popen([*python(text), how], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(10)
        eventually(lambda: not running(child), 5)
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait(10)


def test_a_parent_that_is_there_is_no_reason_to_end() -> None:
    context = multiprocessing.get_context("fork")
    for expected in (os.getpid(), None):
        child = context.Process(target=_declare_and_end, args=(expected,))
        child.start()
        child.join(10)
        assert child.exitcode == 7


def _declare_and_end(expected: int | None) -> None:
    from services.common.processes import die_with_parent

    die_with_parent(expected)
    os._exit(7)


async def test_output_goes_to_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("before\n")
    process = await spawn(
        python("import os, sys; print('out', os.environ['X']); sys.stdout.flush(); print('err', file=sys.stderr)"),
        environment={**ENVIRONMENT, "X": "y"},
        log=log,
        cwd=tmp_path,
    )
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert log.read_text() == "before\nout y\nerr\n"


async def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        await spawn(["/no-such-program"], environment=ENVIRONMENT)


async def test_stopping_asks_first() -> None:
    text = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("ready", flush=True)
        time.sleep(60)
    """
    process = await asyncio.create_subprocess_exec(*python(text), stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 10)
    assert await stop(process, grace_seconds=10) == 3
    assert await stop(process, grace_seconds=10) == 3  # ended already


async def test_stopping_kills_what_does_not_listen() -> None:
    text = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = await asyncio.create_subprocess_exec(*python(text), stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 10)
    began = time.monotonic()
    assert await stop(process, grace_seconds=0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 5


async def test_stopping_one_that_ended_unnoticed() -> None:
    for _ in range(10):
        process = await spawn(["true"], environment=ENVIRONMENT)
        await until(lambda pid=process.pid: not running(pid))  # type: ignore[misc]
        assert await stop(process, grace_seconds=5) == 0


async def test_children_of_a_process_with_calls_under_way_start_unharmed(tmp_path: Path) -> None:
    """With gRPC's fork support on, a quarter of them dies of a signal between fork and exec."""
    log = tmp_path / "children.log"
    stopping = False

    async def calls(echo: Echo) -> None:
        while not stopping:
            await echo.peer.call(echo.stub.one, StringValue(value="x"), deadline_seconds=20)

    async with Echo() as echo:
        busy = [asyncio.create_task(calls(echo)) for _ in range(4)]
        codes = []
        for _ in range(20):
            process = await spawn(["true"], environment=ENVIRONMENT, log=log)
            codes.append(await asyncio.wait_for(process.wait(), 10))
        stopping = True
        await asyncio.gather(*busy)
    assert codes == [0] * 20
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (7, "ended with exit code 7"),
        (-9, "was killed by SIGKILL (by somebody, or by the kernel because memory ran out)"),
        (-11, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),  # a real-time signal has no name
    ],
)
def test_how_a_process_ended_in_words(code, words):
    assert how_it_ended(code) == words
