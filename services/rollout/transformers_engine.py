"""The embedded engine: a transformers model in a child process, on CPU, without vLLM. Exact where it decodes alone.

This side imports no model library. The child (transformers_worker.py) may hang or be killed: it takes nothing with it,
and whoever waits for it is told.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from antiphon.types.v1.chat_pb2 import Conversation
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_WEIGHTS, MemoryTag
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common import errors
from services.common.config import ProcessConfig
from services.common.errors import Unavailable
from services.common.processes import how_it_ended
from services.rollout.child import children_begin_here
from services.rollout.config import RolloutConfig, environment
from services.rollout.engine import DeviceMemory, EngineDead, EngineInfo, Received, Sample, SampleRequest, Unmatched
from services.rollout.model_folder import max_sequence_tokens_of
from services.rollout.transformers_calls import HELLO, Beat, Call, Reply

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
STILL_SECONDS = 120.0
"""A process that has work and says nothing for so long is taken for dead: longer than any one forward."""
WATCH_SECONDS = 0.25
END_SECONDS = 10.0
# They wait for others, with deadlines of their own: silence is no sign of death.
WAITING = ("join", "received")


class TransformersEngine:
    """One child process. Made by `start`; lives in the event loop of the process's main thread."""

    def __init__(self, process: Any, pipe: Connection, still_seconds: float) -> None:
        self._process = process
        self._pipe = pipe
        self._still_seconds = still_seconds
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(HELLO + 1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._to_send: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._problem: str | None = None
        self._closing = False
        self._last_word = time.monotonic()
        self._receive_end = 0.0
        self._info: EngineInfo | None = None
        self._watcher = asyncio.create_task(self._watch(), name="the embedded engine's silence")
        threading.Thread(target=self._hear, name="from the engine", daemon=True).start()
        # A child that stands still takes nothing from its pipe, and the event loop must not wait for it.
        threading.Thread(target=self._send, name="to the engine", daemon=True).start()

    @classmethod
    async def start(
        cls, process: ProcessConfig[RolloutConfig], *, still_seconds: float = STILL_SECONDS
    ) -> TransformersEngine:
        """Raises ConfigError for a folder that holds no model, Unavailable when the child does not come up."""
        begin = time.monotonic()
        max_sequence_tokens = max_sequence_tokens_of(Path(process.model.path), process.settings)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        facts = (theirs, process.model_dump(mode="json"), max_sequence_tokens)
        child = context.Process(target=_child, args=facts, name="engine", daemon=True)
        with _variables(environment(process.settings)), children_begin_here():
            child.start()
        theirs.close()
        engine = cls(child, ours, still_seconds)
        hello = engine._expect(HELLO, "hello")
        try:
            async with asyncio.timeout(START_SECONDS):
                engine._info = await hello
        except TimeoutError:
            await engine.close()
            raise Unavailable(f"the engine's process was not up within {START_SECONDS:.0f} s") from None
        except BaseException:
            await engine.close()
            raise
        logger.info("%s is up after %.1f s, pid %d", engine.info.backend, time.monotonic() - begin, child.pid)
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    def problem(self) -> str | None:
        return self._problem

    async def generate(self, request: SampleRequest) -> Sample:
        plain = SampleRequest(
            id=request.id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            seed=request.seed,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            policy_version=request.policy_version,
            stop_strings=tuple(request.stop_strings),
        )
        try:
            sample: Sample = await self._call("generate", plain)
        except asyncio.CancelledError:
            self._post(Call(next(self._ids), "drop", (request.id,)))
            raise
        return sample

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call("abort", tuple(ids))

    async def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        encoded: list[list[int]] = await self._call("encode", [c.SerializeToString() for c in conversations])
        return encoded

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        logprobs: list[float] = await self._call("probe", list(token_ids))
        return logprobs

    async def unmatched(self, manifest: TransferManifest) -> Unmatched:
        found: Unmatched = await self._call("unmatched", manifest.SerializeToString())
        return found

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> None:
        await self._call("join", manifest.SerializeToString(), first_receiver_rank, deadline_seconds)

    async def begin_receive(self, *, deadline_seconds: float) -> None:
        await self._call("begin_receive", deadline_seconds)
        self._receive_end = time.monotonic() + deadline_seconds

    async def received(self) -> Received:
        state = await self._call("received", max(self._receive_end - time.monotonic(), 0.0))
        return Received(digest=state["digest"], bytes=state["bytes"], seconds=state["seconds"])

    async def load(self, policy_version: int) -> None:
        await self._call("load", policy_version)

    async def give_up_receive(self) -> None:
        await self._call("give_up")

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()

    async def sleep(self, *, discard_weights: bool) -> None:
        await self._call("sleep", discard_weights)

    async def wake(self, tags: Collection[MemoryTag], *, deadline_seconds: float) -> None:
        await self._call("wake", MEMORY_TAG_WEIGHTS in tags)

    async def close(self) -> None:
        self._closing = True
        self._watcher.cancel()
        self._end("the engine was closed")
        await asyncio.to_thread(self._process.join, END_SECONDS)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._problem is not None:
            raise EngineDead(self._problem)
        call = Call(next(self._ids), method, arguments)
        answer = self._expect(call.id, method)
        self._post(call)
        try:
            return await answer
        finally:
            self._pending.pop(call.id, None)

    def _expect(self, call_id: int, method: str) -> asyncio.Future[Any]:
        if not self._working():
            self._last_word = time.monotonic()
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._pending[call_id] = (method, answer)
        return answer

    def _post(self, call: Call) -> None:
        self._to_send.put(call)

    def _working(self) -> bool:
        return any(method not in WAITING for method, _ in self._pending.values())

    async def _watch(self) -> None:
        while self._problem is None:
            await asyncio.sleep(WATCH_SECONDS)
            silence = time.monotonic() - self._last_word
            if self._info is not None and self._working() and silence > self._still_seconds:
                asked = ", ".join(sorted({method for method, _ in self._pending.values()}))
                self._end(f"{self._who} has said nothing for {silence:.0f} s while it was to {asked}; it was killed")

    @property
    def _who(self) -> str:
        return f"the engine's process (pid {self._process.pid})"

    def _end(self, problem: str) -> None:
        """Kills the process; everybody who waits for it is told."""
        if self._problem is None:
            self._problem = problem
            (logger.info if self._closing else logger.error)("%s", problem)
        self._process.kill()
        self._to_send.put(None)
        pending, self._pending = self._pending, {}
        for _, answer in pending.values():
            if not answer.done():
                answer.set_exception(EngineDead(self._problem))
                answer.exception()  # its caller may be gone

    def _on_message(self, message: Reply | Beat) -> None:
        self._last_word = time.monotonic()
        if isinstance(message, Beat):
            return
        _, answer = self._pending.pop(message.id, ("", None))
        if answer is None or answer.done():
            return  # a call that was cancelled
        if message.error:
            answer.set_exception(getattr(errors, message.error)(message.message))
        else:
            answer.set_result(message.value)

    def _hear(self) -> None:
        try:
            while True:
                self._in_loop(self._on_message, self._pipe.recv())
        except (EOFError, OSError):
            pass
        self._process.join(END_SECONDS)
        self._in_loop(self._end, f"{self._who} {self._how_it_ended()}")

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        return "closed its pipe and did not end" if code is None else f"{how_it_ended(code)}; see the log"

    def _in_loop(self, function: Any, argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: the service has ended
            pass

    def _send(self) -> None:
        try:
            while (call := self._to_send.get()) is not None:
                self._pipe.send(call)
        except OSError:  # the process is gone; `_hear` says so
            pass


def _child(pipe: Connection, process: dict[str, Any], max_sequence_tokens: int) -> None:
    from services.rollout.transformers_worker import serve

    serve(pipe, ProcessConfig[RolloutConfig].model_validate(process), max_sequence_tokens)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """A child inherits them; some count only from its very beginning, and none are this process's business."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
