"""An engine in memory, for the tests: deterministic samples, and a transfer that the test delivers or breaks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Sequence
from typing import ClassVar

from antiphon.types.v1.chat_pb2 import Conversation
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS, MemoryTag
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common.errors import InvalidRequest, Unavailable
from services.rollout.engine import (
    DeviceMemory,
    EngineDead,
    EngineInfo,
    Received,
    Sample,
    SampleRequest,
    Span,
    Unmatched,
)

VOCABULARY = 100
INFO = EngineInfo(
    backend="memory 1",
    pids=(4242,),
    transfer_ranks=1,
    max_sequence_tokens=32,
    dtype="float32",
    vocabulary_size=VOCABULARY,
    lowest_temperature=0.01,
    highest_temperature=2.0,
    can_sleep=True,
)


def token_at(seed: int, position: int) -> int:
    """What the engine samples."""
    return hashlib.sha256(f"{seed}/{position}".encode()).digest()[0] % VOCABULARY


class Device:
    """A GPU of 1,000 bytes that the engine and others hold."""

    sizes: ClassVar = {MEMORY_TAG_WEIGHTS: 600, MEMORY_TAG_KV: 200}
    untagged = 50

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.others = 100
        self.leaked = 0
        self.asleep: set[MemoryTag] = set()

    def memory(self) -> DeviceMemory:
        held = {tag: size for tag, size in self.sizes.items() if tag not in self.asleep}
        asleep = {tag: size for tag, size in self.sizes.items() if tag in self.asleep}
        untagged = 0 if len(asleep) == 2 else self.untagged
        return DeviceMemory(
            uuid=self.uuid,
            total_bytes=1000,
            free_bytes=1000 - self.others - self.leaked - sum(held.values()) - untagged,
            held=held,
            held_untagged=untagged,
            asleep=asleep,
            asleep_untagged=self.untagged - untagged,
        )


class MemoryEngine:
    """Finishes a request at once, or, after `pause()`, when `resume()` is called or the request is aborted."""

    def __init__(self, gpus: int = 0) -> None:
        self.devices = [Device(f"GPU-{number}") for number in range(gpus)]
        self.asleep: set[MemoryTag] = set()
        self.sleeps: list[bool] = []
        self.wakes: list[set[MemoryTag]] = []
        self.leak = 0  # bytes of each device that the next sleep does not give back
        self.wake_error: Exception | None = None
        self.order: list[str] = []
        self.may_move = asyncio.Event()  # sleeps end once it is set
        self.may_move.set()
        self.wakes_take_effect = True
        self.info = INFO
        self.requests: list[SampleRequest] = []
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.cancelled: list[str] = []
        self.version = -1
        self.loads = 0
        self.closed = False
        self.given_up = 0
        self.joined: list[tuple[int, int]] = []
        self.found = Unmatched()
        self.join_error: Exception | None = None
        self.probe_logprobs: list[float] = [-1.0, -2.0]
        self.load_error: Exception | None = None
        self._problem: str | None = None
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._arrival: asyncio.Future[Received] | None = None

    # What a test does with it.

    def pause(self) -> None:
        self._may_run.clear()

    def resume(self) -> None:
        self._may_run.set()
        for event in self.running.values():
            event.set()

    def finish(self, beginning: str) -> None:
        """Those requests whose ids begin so, though the engine is paused."""
        for request_id, event in self.running.items():
            if request_id.startswith(beginning):
                event.set()

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.running) < count:  # noqa: ASYNC110 - the service sets no event
                await asyncio.sleep(0.001)

    def deliver(self, digest: int = 77, size: int = 1000) -> None:
        """The last bucket has arrived."""
        assert self._arrival is not None
        self._arrival.set_result(Received(digest=digest, bytes=size, seconds=0.5, extra_bytes=4096))

    def break_transfer(self, error: Exception) -> None:
        assert self._arrival is not None
        self._arrival.set_exception(error)

    def die(self) -> None:
        self._problem = "the engine core is dead"
        for event in self.running.values():
            event.set()

    # What the service does with it.

    def problem(self) -> str | None:
        return self._problem

    async def generate(self, request: SampleRequest) -> Sample:
        self._check()
        assert not self.asleep, "memory that sleeps was touched"
        self.requests.append(request)
        event = self.running[request.id] = asyncio.Event()
        try:
            if not self._may_run.is_set():
                await event.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        finally:
            del self.running[request.id]
        self._check()
        aborted = request.id in self.aborted
        count = 2 if aborted else request.max_tokens
        tokens = [token_at(request.seed, i) for i in range(count)]
        return Sample(
            token_ids=tokens,
            logprobs=[-(token + 1) / 100 for token in tokens],
            finish_reason="aborted" if aborted else "length",
            spans=(Span(0, count, self.version),),
        )

    async def abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            if request_id in self.running:
                self.aborted.add(request_id)
                self.running[request_id].set()

    async def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        if any(not conversation.messages for conversation in conversations):
            raise InvalidRequest("conversation 0: the chat template refuses it")
        return [[len(message.content) for message in conversation.messages] for conversation in conversations]

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        self._check()
        assert not self.asleep, "a paused engine answers no probe"
        self.order.append("probe")
        return self.probe_logprobs

    async def unmatched(self, manifest: TransferManifest) -> Unmatched:
        return self.found

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> None:
        if self.join_error is not None:
            raise self.join_error
        self.joined.append((manifest.epoch, first_receiver_rank))

    async def begin_receive(self, *, deadline_seconds: float) -> None:
        self._arrival = asyncio.get_running_loop().create_future()

    async def received(self) -> Received:
        assert self._arrival is not None
        return await self._arrival

    async def load(self, policy_version: int) -> None:
        self._check()
        if self.load_error is not None:
            raise self.load_error
        assert MEMORY_TAG_WEIGHTS not in self.asleep, "memory that sleeps was touched"
        self.order.append("load")
        self.loads += 1
        self.version = policy_version

    async def give_up_receive(self) -> None:
        self.given_up += 1
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(Unavailable("the transfer group was left"))

    async def memory(self) -> Sequence[DeviceMemory]:
        self._check()
        return [device.memory() for device in self.devices]

    async def sleep(self, *, discard_weights: bool) -> None:
        self._check()
        assert not self.running, "put to sleep while it samples"
        self.sleeps.append(discard_weights)
        await self.may_move.wait()
        self.asleep = {MEMORY_TAG_WEIGHTS, MEMORY_TAG_KV}
        for device in self.devices:
            device.asleep = set(self.asleep)
            device.leaked += self.leak

    async def wake(self, tags: Collection[MemoryTag], *, deadline_seconds: float) -> None:
        self._check()
        if self.wake_error is not None:
            raise self.wake_error
        assert set(tags) <= self.asleep and deadline_seconds > 0
        self.order.append("wake")
        self.wakes.append(set(tags))
        self.asleep -= set(tags)
        for device in self.devices if self.wakes_take_effect else ():
            device.asleep = set(self.asleep)

    async def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self._problem is not None:
            raise EngineDead(self._problem)
