"""The process that holds the reference model, as the service sees it: started, fed with micro-batches, watched.

A model that is frozen can always be loaded again: when its process ends, or says nothing for too long in the middle of
a micro-batch, whoever waits gets Unavailable with the cause, and another process is started. Only a model that can
never be used (ConfigError) ends `run`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from antiphon.reward.v1 import reference_pb2, reward_pb2
from antiphon.types.v1 import chat_pb2

from services.common import processes
from services.common.errors import ConfigError, Unavailable
from services.common.framing import framed, read_frame
from services.reward.reference_settings import ReferenceSettings

logger = logging.getLogger(__name__)

CHILD_MODULE = "services.reward.reference_child"
ANSWER_BYTES = 2**30
STOP_SECONDS = 3.0
PAUSES_SECONDS = (0.5, 2.0, 10.0, 30.0)
"""Before each new start; the last one again and again."""
REPORT_SECONDS = 30.0


class ReferenceProcess:
    """One process at a time. `run` it beside the server; `compute` from anywhere, one micro-batch at a time."""

    def __init__(self, settings: ReferenceSettings, log: Path, child_module: str = CHILD_MODULE) -> None:
        self._settings = settings
        self._log = log
        self._child_module = child_module
        self._problem: str | None = "the reference model is still loading"
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._one_at_a_time = asyncio.Lock()
        self.info: reward_pb2.ReferenceInfo | None = None
        """What the model said of itself; None before it was loaded."""
        self.on_change: Callable[[], None] = lambda: None

    @property
    def problem(self) -> str | None:
        """Why it cannot compute now; None when it can."""
        return self._problem

    @property
    def is_loading(self) -> bool:
        """For the first time: nothing has gone wrong yet."""
        return self._problem is not None and self.info is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def run(self) -> None:
        """Keeps a process up until cancelled. Raises ConfigError for a model that can never be used."""
        number = 0
        try:
            while True:
                try:
                    await self._load()
                    number = 0
                    assert self._process is not None
                    code = await self._process.wait()
                    if self._problem is None:
                        self._say(f"the process of the reference model {processes.how_it_ended(code)}")
                except Unavailable as error:
                    self._say(str(error))
                await self._end()
                pause = PAUSES_SECONDS[min(number, len(PAUSES_SECONDS) - 1)]
                logger.error("%s; loading it again in %.1f s; log: %s", self._problem, pause, self._log)
                await asyncio.sleep(pause)
                number += 1
        finally:
            self._say("the reference model is stopping")
            await self._end()

    async def compute(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """The log-probs of a micro-batch. Raises Unavailable with the cause."""
        async with self._one_at_a_time:
            if self._problem is not None or self._streams is None:
                raise Unavailable(self._problem or "the reference model is loading")
            reader, writer = self._streams
            sequences = [chat_pb2.TokenIds(ids=row) for row in rows]
            command = reference_pb2.ReferenceCommand(temperature=temperature, sequences=sequences)
            tokens = sum(len(row) for row in rows)
            try:
                async with asyncio.timeout(self._settings.batch_seconds):
                    reporting = asyncio.create_task(self._report(len(rows), tokens))
                    try:
                        writer.write(framed(command.SerializeToString()))
                        await writer.drain()
                        reply = reference_pb2.ReferenceReply.FromString(await read_frame(reader, ANSWER_BYTES))
                    finally:
                        reporting.cancel()
            except TimeoutError:
                seconds = self._settings.batch_seconds
                self._say(f"the reference model did not answer {tokens} tokens within {seconds:g} s; it was ended")
                self._kill()
                raise Unavailable(f"{self._problem}; log: {self._log}") from None
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                await self._wait_for_the_cause()
                raise Unavailable(f"{self._problem}; log: {self._log}") from None
            except asyncio.CancelledError:
                self._kill()  # its answer would be taken for that of the next micro-batch
                raise
            return [list(row.logprobs) for row in reply.rows.rows]

    async def _load(self) -> None:
        """Starts a process and waits for its hello. Raises ConfigError, or Unavailable with the cause."""
        settings = self._settings
        # Short and private: a Unix socket's path has at most 107 bytes, and only this user may connect.
        folder = Path(tempfile.mkdtemp(prefix="antiphon-"))
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(connect, str(folder / "reference"))
        arguments = ["--socket", str(folder / "reference"), "--path", settings.path]
        arguments += ["--dtype", settings.dtype, "--device", settings.device]
        try:
            process = await processes.spawn(
                [sys.executable, "-m", self._child_module, *arguments],
                environment=_environment(settings),
                log=self._log,
            )
            self._process = process
            ending = asyncio.create_task(process.wait())
            hello = asyncio.create_task(_hello(connected))
            try:
                await asyncio.wait({ending, hello}, timeout=settings.start_seconds, return_when=asyncio.FIRST_COMPLETED)
                if not hello.done() and not ending.done():
                    raise Unavailable(f"the reference model was not loaded after {settings.start_seconds:g} s")
                if not hello.done():
                    await asyncio.wait({hello}, timeout=STOP_SECONDS)  # what it said before it ended
                if not hello.done() or hello.exception() is not None:
                    how = processes.how_it_ended(await ending)
                    raise Unavailable(f"the process of the reference model {how} before it had loaded")
                self._take(hello.result(), connected.result())
            finally:
                hello.cancel()
                ending.cancel()
        finally:
            server.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _take(
        self, reply: reference_pb2.ReferenceReply, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        if reply.WhichOneof("part") == "failure":
            error = ConfigError if reply.failure.is_config else Unavailable
            raise error(f"{reply.failure.message}; log: {self._log}")
        info = reply.hello
        if self._settings.max_sequence_tokens is not None:
            info.max_sequence_tokens = min(info.max_sequence_tokens, self._settings.max_sequence_tokens)
        if self.info is not None and self.info.digest != info.digest:
            raise ConfigError(
                f"reference {info.path}: its weights changed while the run goes on: digest {info.digest:016x}, "
                f"{self.info.digest:016x} before; put the first ones back"
            )
        self.info = info
        self._streams = streams
        self._say(None)
        logger.info("reference model %s (%s, digest %016x) is loaded", info.path, info.dtype, info.digest)

    def _say(self, problem: str | None) -> None:
        self._problem = problem
        self.on_change()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._streams = None
            try:
                os.kill(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def _wait_for_the_cause(self) -> None:
        """The connection is broken: the process has ended, or does not make sense any more."""
        assert self._process is not None
        self._streams = None
        try:
            code = await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            self._say(f"the process of the reference model {processes.how_it_ended(code)}")
        except TimeoutError:
            self._say("the process of the reference model broke its connection; it was ended")
            self._kill()

    async def _end(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        if self._process is not None:
            await processes.stop(self._process, STOP_SECONDS)

    async def _report(self, rows: int, tokens: int) -> None:
        waited = 0.0
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            waited += REPORT_SECONDS
            logger.info(
                "waiting %.0f of at most %.0f s for the reference model's log-probs of %d rows, %d tokens",
                waited, self._settings.batch_seconds, rows, tokens,
            )  # fmt: skip


async def _hello(
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
) -> reference_pb2.ReferenceReply:
    reader, _ = await connected
    return reference_pb2.ReferenceReply.FromString(await read_frame(reader, ANSWER_BYTES))


def _environment(settings: ReferenceSettings) -> dict[str, str]:
    threads = settings.threads or len(os.sched_getaffinity(0))
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # The model is a folder: nothing is looked up elsewhere.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
