"""The ranks of a learner as the service's parent process sees them: children that it starts, feeds and watches.

Every rank gets every command. A command is over when every rank has answered it; rank 0's answer is the result. There
are two kinds of failure:
- an error of services/common/errors.py, answered by a rank that goes on: it is raised to whoever asked;
- the loss of a rank (its process ended, or it answered with any other exception, or nobody said anything for
  `silence_seconds` in the middle of work): the collectives of the others cannot end any more, so all are ended. Whoever
  waits gets Unavailable with the first cause, its traceback and the log that has the rest. Ranks are not started again:
  their weights and optimizer state are gone; the service says so, and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from antiphon.learner.v1 import ranks_pb2

from services.common import processes
from services.common.errors import Unavailable
from services.common.operations import Report
from services.learner import rank_losses
from services.learner.framing import framed, read_message
from services.learner.rank_answers import Answers, error_class
from services.learner.rank_losses import Loss, Losses

logger = logging.getLogger(__name__)

JUDGE_SECONDS = 0.3
"""After the first sign of a loss the others have so long to give theirs, so that the cause is told from its echoes."""
DYING_SECONDS = 10.0
"""A process that used a GPU closes its connection first, and takes seconds to end: how it ended is the cause."""
STOP_SECONDS = 5.0
WATCH_PERIOD_SECONDS = 1.0


class Ranks(Protocol):
    """What the learner needs of its ranks; tests put a twin without processes in their place."""

    @property
    def hello(self) -> ranks_pb2.RankHello:
        """Rank 0's. Raises Unavailable before every rank has loaded the model, and after one was lost."""
        ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def count(self) -> int: ...

    @property
    def problem(self) -> str | None:
        """What is wrong with them; None when they work."""
        ...

    @property
    def is_lost(self) -> bool:
        """A rank was lost, for good."""
        ...

    async def run(self, command: ranks_pb2.RankCommand, report: Report | None = None) -> ranks_pb2.RankReply:
        """Has every rank do the command; answers rank 0's reply, or raises what the first failing rank said."""
        ...

    async def run_all(self, command: ranks_pb2.RankCommand, report: Report | None = None) -> list[ranks_pb2.RankReply]:
        """The same, and every rank's reply, in rank order."""
        ...

    def give_up(self, problem: str) -> None:
        """Ends all ranks: what they hold cannot be relied on any more, and this is why."""
        ...


@dataclass
class _Rank:
    number: int
    log: Path
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None


RANK_MODULE = "services.learner.rank_main"

RankCommandLine = Callable[[int, Path, Path], Sequence[str]]
"""(rank, socket, rendezvous file) → the command that starts it."""


def rank_command_line(config: Path, ranks: int, module: str = RANK_MODULE) -> RankCommandLine:
    """How ranks are started: `module` parses these options (services/learner/rank_main.py)."""

    def command(rank: int, socket: Path, rendezvous: Path) -> list[str]:
        options = {
            "config": config,
            "socket": socket,
            "rendezvous": rendezvous,
            "rank": rank,
            "ranks": ranks,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [sys.executable, "-m", module, *arguments]

    return command


def threads_for_each(ranks: int) -> int:
    """Cores of this process, shared out."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class RankProcesses:
    """See the module's docstring. Make it, `start` it in the event loop of the process's main thread, `stop` it."""

    def __init__(
        self,
        count: int,
        command_line: RankCommandLine,
        log_folder: Path,
        log_name: str,
        *,
        environment: dict[str, str],
        start_seconds: float,
        silence_seconds: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._command_line = command_line
        self._ranks = [_Rank(number, log_folder / f"{log_name}-rank{number}.log") for number in range(count)]
        self._environment = environment
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self.on_change = on_change
        self._hellos: dict[int, ranks_pb2.RankHello] = {}
        self._ready: asyncio.Future[None] | None = None
        self._answers = Answers(count)
        self._last_word = time.monotonic()
        self._losses = Losses()
        self._rank_ended = asyncio.Event()
        """Some rank's process has."""
        self._problem: str | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self.lost = asyncio.Event()
        """Set once, when a rank was lost and all are being ended."""

    @property
    def hello(self) -> ranks_pb2.RankHello:
        if self._problem is not None:
            raise Unavailable(self._problem)
        if len(self._hellos) < self.count:
            raise Unavailable(f"{self.count - len(self._hellos)} of {self.count} ranks are still loading the model")
        return self._hellos[0]

    @property
    def pids(self) -> list[int]:
        return [r.process.pid for r in self._ranks if r.process is not None and r.process.returncode is None]

    @property
    def count(self) -> int:
        return len(self._ranks)

    @property
    def problem(self) -> str | None:
        if self._problem is None and len(self._hellos) < self.count:
            return f"{len(self._hellos)} of {self.count} ranks have loaded the model"
        return self._problem

    @property
    def is_lost(self) -> bool:
        return self.lost.is_set()

    async def start(self) -> None:
        """Starts all ranks and waits until each has loaded the model. Raises Unavailable with the first cause."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        # Short and private: a Unix socket's path has at most 107 bytes, and only this user may connect.
        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-"))
        socket, rendezvous = self._folder / "ranks", self._folder / "rendezvous"
        self._server = await asyncio.start_unix_server(self._connected, str(socket))
        self._last_word = time.monotonic()
        try:
            for rank in self._ranks:
                rank.log.parent.mkdir(parents=True, exist_ok=True)
                command = self._command_line(rank.number, socket, rendezvous)
                rank.process = await processes.spawn(command, environment=self._environment, log=rank.log)
                self._task(self._watch_process(rank))
            self._task(self._watch_silence())
            await asyncio.wait_for(asyncio.shield(self._ready), self._start_seconds)
        except TimeoutError:
            missing = [rank.number for rank in self._ranks if rank.number not in self._hellos]
            self._end_all(
                f"ranks {missing} had not loaded the model after {self._start_seconds:.0f} s; "
                f"logs: {', '.join(str(self._ranks[number].log) for number in missing)}"
            )
            raise Unavailable(self._problem or "") from None

    async def run(self, command: ranks_pb2.RankCommand, report: Report | None = None) -> ranks_pb2.RankReply:
        return (await self._run(command, report))[0]

    async def run_all(self, command: ranks_pb2.RankCommand, report: Report | None = None) -> list[ranks_pb2.RankReply]:
        return await self._run(command, report)

    def give_up(self, problem: str) -> None:
        self._end_all(problem)

    async def _run(self, command: ranks_pb2.RankCommand, report: Report | None) -> list[ranks_pb2.RankReply]:
        _ = self.hello  # raises while they cannot work
        asked = self._answers.begin(command, report)
        data = framed(command)  # may raise: before anybody waits for an answer
        if not self._answers.are_awaited:
            self._last_word = time.monotonic()
        self._answers.enter(command, asked)
        for rank in self._ranks:
            if rank.writer is not None:
                rank.writer.write(data)
        # A cancelled caller leaves the command to its end: the ranks are doing it.
        return await asyncio.shield(asked.result)

    async def stop(self) -> None:
        """Ends the ranks: asks them, then SIGTERM, then SIGKILL. Commands under way get Unavailable."""
        self._stopping = True
        if self._problem is None:
            self._problem = "the learner is stopping"
        self._fail_pending()
        for rank in self._ranks:
            if rank.writer is not None:
                rank.writer.write(framed(ranks_pb2.RankCommand(shutdown=ranks_pb2.RankShutdown())))
                rank.writer.close()
        ending = [processes.stop(r.process, STOP_SECONDS) for r in self._ranks if r.process is not None]
        await asyncio.gather(*ending)
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One rank's connection, from its first word to the end."""
        rank: _Rank | None = None
        while (reply := await read_message(reader, ranks_pb2.RankReply)) is not None:
            self._last_word = time.monotonic()
            if rank is None:
                rank = self._ranks[reply.rank]
                rank.writer = writer
            self._heard(rank, reply)
        if rank is not None and not self._stopping:
            rank.writer = None
            self._lost(rank_losses.of_closing(rank.number, rank.log))

    def _heard(self, rank: _Rank, reply: ranks_pb2.RankReply) -> None:
        part = reply.WhichOneof("part")
        if part == "hello":
            self._hellos[rank.number] = reply.hello
            if len(self._hellos) == self.count and self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
                self.on_change()
            return
        if part == "failure" and (not self._answers.knows(reply.id) or error_class(reply.failure) is None):
            self._lost(rank_losses.of_failure(rank.number, reply.failure, rank.log))
            return
        reply.rank = rank.number
        self._answers.heard(reply)

    async def _watch_process(self, rank: _Rank) -> None:
        assert rank.process is not None
        code = await rank.process.wait()
        if not self._stopping:
            self._lost(self._losses.of_death(rank.number, rank.process.pid, code, rank.log))
            self._rank_ended.set()

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_SECONDS)
            silence = time.monotonic() - self._last_word
            if self._answers.are_awaited and silence > self._silence_seconds:
                logs = ", ".join(str(rank.log) for rank in self._ranks)
                self._end_all(f"no rank has said anything for {silence:.0f} s in the middle of work; logs: {logs}")

    def _lost(self, loss: Loss) -> None:
        if self._problem is None and self._losses.note(loss):
            self._task(self._judge())

    async def _judge(self) -> None:
        """Finds the cause among the signs: the first of the likeliest kind."""
        await asyncio.sleep(JUDGE_SECONDS)
        if self._losses.only_closed:
            try:
                async with asyncio.timeout(DYING_SECONDS):
                    await self._rank_ended.wait()
            except TimeoutError:
                pass
        self._end_all(self._losses.cause)

    def _end_all(self, problem: str) -> None:
        if self._problem is not None:
            return
        self._problem = problem
        logger.error("the ranks are lost: %s", problem)
        for rank in self._ranks:
            if rank.process is not None and rank.process.returncode is None:
                rank.process.kill()  # it may sit in a collective that can never end
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(Unavailable(problem))
        self._fail_pending()
        self.lost.set()
        self.on_change()

    def _fail_pending(self) -> None:
        self._answers.fail_all(self._problem or "the learner is stopping")

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
