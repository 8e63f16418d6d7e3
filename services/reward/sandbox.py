"""Child processes for code that may hang or break, one call at a time each. Knows processes, not rewards.

Own children instead of a pool library: the whole family of a child must die with it, also when this service is killed,
and the service must know how a child ended and what it printed last.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.framing import framed, read_frame
from services.common.processes import how_it_ended

logger = logging.getLogger(__name__)

ANSWER_BYTES = 2**20  # of one candidate
OUTPUT_KEPT_BYTES = 2**20  # of everything that user code prints, per sandbox
TAIL_BYTES = 2000  # of the last output, for messages
STOP_SECONDS = 3.0  # for a guardian to kill its family
REPORT_SECONDS = 15.0  # between two lines about calls that take long


@dataclass(frozen=True)
class Limits:
    timeout_seconds: float
    start_seconds: float
    memory_mib: int
    processes: int
    allow_network: bool
    allow_processes: bool


class Refused(Exception):
    """The user's file cannot be imported or has no such function."""


class TimedOut(Exception):
    """The call took longer than its limit; the child was killed."""


class Died(Exception):
    """The child ended, or stopped making sense, during the call."""


class Sandbox:
    """A fixed number of children. A dead one is replaced when the next call needs it."""

    def __init__(self, name: str, program: Mapping[str, Any], limits: Limits, log: Path) -> None:
        """`program` says in the first frame what a child shall load: the same text for one that is started later."""
        self._name = name
        self._program = program
        self._limits = limits
        self._output = _Output(log)
        self._places: asyncio.Queue[_Child | None] = asyncio.Queue()
        self._children: set[_Child] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._begun: dict[asyncio.Task[Any], float] = {}
        self._waiting = 0
        self._reporting: asyncio.Task[None] | None = None
        self._problem: str | None = "not started"
        self.wants: list[str] = []
        """What the program asks to be told, known after `start`."""

    async def start(self) -> None:
        """Starts every child. Raises Refused, TimedOut or Died when one does not come up."""
        for _ in range(self._limits.processes):
            self._places.put_nowait(await self._start_child())
        self._reporting = asyncio.create_task(self._report())

    def problem(self) -> str | None:
        """Why the last start of a child failed; None when it came up."""
        return self._problem

    async def call(self, task: Mapping[str, Any], candidates: int = 1) -> dict[str, Any]:
        """The child's answer. Raises TimedOut or Died. A cancelled caller leaves the call to run to its limit."""
        self._waiting += 1
        try:
            child = await self._places.get()
        finally:
            self._waiting -= 1
        running = asyncio.create_task(self._run(child, task, candidates))
        self._calls.add(running)
        self._begun[running] = time.monotonic()
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    async def close(self) -> None:
        """Kills every child and its family."""
        if self._reporting is not None:
            self._reporting.cancel()
        for running in list(self._calls):
            running.cancel()
        await asyncio.gather(*(child.kill() for child in list(self._children)))

    def _ended(self, running: asyncio.Task[Any]) -> None:
        self._calls.discard(running)
        self._begun.pop(running, None)
        if not running.cancelled():
            running.exception()  # seen, also if nobody waits

    async def _report(self) -> None:
        """Says what is waited for, so that a run which stands still because of a slow scorer says so."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            oldest = max((time.monotonic() - begun for begun in self._begun.values()), default=0.0)
            if oldest >= REPORT_SECONDS:
                logger.info(
                    "%s: %d call(s) run, the oldest for %.0f of at most %.0f s; %d more wait for one of %d child(ren)",
                    self._name, len(self._begun), oldest, self._limits.timeout_seconds, self._waiting,
                    self._limits.processes,
                )  # fmt: skip

    async def _run(self, child: _Child | None, task: Mapping[str, Any], candidates: int) -> dict[str, Any]:
        try:
            if child is None:
                try:
                    child = await self._start_child()
                except (Refused, TimedOut) as error:
                    raise Died(f"a new child did not come up: {error}") from None
            answer = await child.ask(task, self._limits.timeout_seconds, candidates)
            if answer.get("last"):
                await self._discard(child)
                child = None
            return answer
        except BaseException:
            if child is not None:
                await self._discard(child)
                child = None
            raise
        finally:
            self._places.put_nowait(child)

    async def _start_child(self) -> _Child:
        child: _Child | None = None
        try:
            child = await _Child.launch(self._output)
            self._children.add(child)
            limits = self._limits
            start = {
                **self._program,
                "memory_mib": limits.memory_mib,
                "allow_network": limits.allow_network,
                "allow_processes": limits.allow_processes,
            }
            answer = await child.ask(start, limits.start_seconds)
            if "refused" in answer:
                raise Refused(str(answer["refused"]))
            if not answer.get("ready"):
                raise Died("the child did not say that it is ready; user code wrote to its socket?")
            self.wants = answer["wants"]
        except BaseException as error:
            self._problem = f"{type(error).__name__}: {error}"
            if child is not None:
                await self._discard(child)
            raise
        if self._problem is not None:
            logger.info(
                "%s: child %d is ready: %.0f s a call, %d MiB; not enforced: %s",
                self._name, child.pid, limits.timeout_seconds, limits.memory_mib, ", ".join(answer["not_enforced"]),
            )  # fmt: skip
        self._problem = None
        return child

    async def _discard(self, child: _Child) -> None:
        await child.kill()
        self._children.discard(child)


class _Child:
    """One guardian with its worker, and the socket to the worker."""

    def __init__(self, process: asyncio.subprocess.Process, home: Path, output: _Output) -> None:
        self._process = process
        self._home = home
        self._output = output
        self._tail = bytearray()
        self._drain = asyncio.create_task(self._read_output())
        self._asked = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def launch(cls, output: _Output) -> _Child:
        ours, theirs = socket.socketpair()
        home = Path(tempfile.mkdtemp(prefix="antiphon-reward-"))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.reward.child", str(theirs.fileno()), str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(home), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        except BaseException:
            ours.close()
            shutil.rmtree(home, ignore_errors=True)
            raise
        finally:
            theirs.close()
        child = cls(process, home, output)
        child._reader, child._writer = await asyncio.open_connection(sock=ours)
        return child

    async def ask(self, message: Mapping[str, Any], seconds: float, candidates: int = 1) -> dict[str, Any]:
        """Sends one frame and waits for the answer to it. Raises TimedOut or Died; the child is then of no more use."""
        self._asked += 1
        data = json.dumps({"id": self._asked, **message}).encode()
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(framed(data))
                await self._writer.drain()
                answer = json.loads(await read_frame(self._reader, ANSWER_BYTES * candidates))
        except TimeoutError:
            raise TimedOut(f"no answer within {seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Died(f"the child {await self._how_it_ended()}{await self._last_words()}") from None
        except ValueError as error:
            raise Died(f"the child's answer makes no sense: {error}") from None
        if not isinstance(answer, dict) or answer.get("id", self._asked) != self._asked:
            raise Died("the child answered something else than what it was asked; user code wrote to its socket?")
        return answer

    async def kill(self) -> None:
        """Ends the worker and all it started, through the guardian; the guardian itself when it does not obey."""
        if self._process.returncode is None:
            try:
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except ProcessLookupError:
                pass
            except TimeoutError:
                logger.warning("guardian %d did not end within %.0f s; killing it", self.pid, STOP_SECONDS)
                self._process.kill()
                await self._process.wait()
        self._writer.close()
        self._drain.cancel()
        shutil.rmtree(self._home, ignore_errors=True)

    async def _how_it_ended(self) -> str:
        try:
            return how_it_ended(await asyncio.wait_for(self._process.wait(), STOP_SECONDS))
        except TimeoutError:
            return "closed its socket"

    async def _last_words(self) -> str:
        await asyncio.wait({self._drain}, timeout=STOP_SECONDS)  # its end may be known before its output has been read
        text = bytes(self._tail).decode("utf-8", "replace").strip()
        return f"; its last output:\n{text}" if text else ""

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while part := await self._process.stdout.read(2**16):
            self._tail += part
            del self._tail[:-TAIL_BYTES]
            self._output.keep(part)


class _Output:
    """What user code prints: the first part in a file of its own, the rest counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = 0
        self._full = False

    def keep(self, part: bytes) -> None:
        if self._full:
            return
        part = part[: OUTPUT_KEPT_BYTES - self._kept]
        self._kept += len(part)
        with self._path.open("ab") as file:
            file.write(part)
            if self._kept >= OUTPUT_KEPT_BYTES:
                self._full = True
                file.write(b"\n[no more of the output is kept]\n")
                logger.warning("%s: user code printed more than %d bytes; the rest is not kept", self._path, self._kept)
