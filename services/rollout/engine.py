"""What the service needs of an engine: samples one request at a time, takes weights, says whether it lives.

Pure types; each engine is in a file named for its library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from antiphon.types.v1.chat_pb2 import Conversation
from antiphon.types.v1.grant_pb2 import MemoryTag
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common.errors import Unavailable


class EngineDead(Unavailable):
    """The engine's process is gone, or its model is torn: only a new process helps."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, fixed from its start."""

    backend: str
    """Library and version, e.g. "vllm 0.32.0"."""
    pids: tuple[int, ...]
    """Processes that do the work, apart from this one."""
    transfer_ranks: int
    max_sequence_tokens: int
    dtype: str
    vocabulary_size: int
    lowest_temperature: float
    """Smallest temperature above 0 that it takes as it is."""
    highest_temperature: float
    can_sleep: bool
    """Whether it can give its memory up."""


@dataclass(frozen=True)
class SampleRequest:
    """One trajectory to sample."""

    id: str
    """Unique among those under way; `abort` names it."""
    prompt_token_ids: Sequence[int]
    seed: int
    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    policy_version: int
    """The committed version; keys and values cached under another one are not used."""
    stop_strings: Sequence[str] = ()
    """Searched in the text of the sampled tokens, special tokens included; the token that completes one is the last."""


@dataclass(frozen=True)
class Span:
    """Sampled tokens [start, end) come from this version."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True)
class Sample:
    """What was sampled for a request."""

    token_ids: Sequence[int]
    """Sampled tokens only; a stop token is the last of them."""
    logprobs: Sequence[float]
    """Of each of them, natural, under the distribution it was drawn from; at temperature 0 that of temperature 1."""
    finish_reason: Literal["stop", "length", "aborted"]
    spans: Sequence[Span]
    """Stamped by the engine when it sampled; they cover all of token_ids."""
    stop_string: str = ""
    """The stop string that ended it; empty when a token did, or anything else."""


@dataclass(frozen=True)
class Unmatched:
    """Names in which a manifest and the engine's model differ."""

    unknown: Sequence[str] = ()
    missing: Sequence[str] = ()
    differing: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.unknown or self.missing or self.differing)


@dataclass(frozen=True)
class Received:
    """A publication that has arrived. Ranks of one engine that disagree are an error before this."""

    digest: int
    bytes: int
    seconds: float
    """From the start of the receive until the last bucket."""
    extra_bytes: int = 0
    """Most memory of one GPU that the transfer took beyond the model; 0 on CPU."""


@dataclass(frozen=True)
class DeviceMemory:
    """One GPU, as the engine's worker on it sees it."""

    uuid: str
    """"GPU-…", the same in every process of the host."""
    total_bytes: int
    free_bytes: int
    """On the whole device, by the driver."""
    held: Mapping[MemoryTag, int]
    """Bytes that the engine's allocator holds there now, by tag."""
    held_untagged: int
    """Bytes that the same allocator holds for other things (workspaces, graphs): they sleep and wake with any tag."""
    asleep: Mapping[MemoryTag, int]
    """Bytes that a wake takes again, by tag."""
    asleep_untagged: int

    @property
    def sleepable_bytes(self) -> int:
        """What a sleep must free."""
        return sum(self.held.values()) + self.held_untagged

    def waking_bytes(self, tags: Collection[MemoryTag]) -> int:
        """What a wake of these tags takes."""
        return sum(self.asleep.get(tag, 0) for tag in tags) + self.asleep_untagged


class Engine(Protocol):
    """One engine. Every method may raise EngineDead. Methods that wait end at their deadline with Expired."""

    @property
    def info(self) -> EngineInfo: ...

    def problem(self) -> str | None:
        """None while the engine lives, else what is wrong with it."""

    async def generate(self, request: SampleRequest) -> Sample:
        """Samples one trajectory. Cancelling it aborts the work."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Ends requests now; their `generate` answers with what was sampled so far. Unknown ids are ignored."""

    async def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Token ids by the engine's own tokenizer and chat template, up to where the assistant's next turn begins.

        Raises InvalidRequest when the template refuses.
        """

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, temperature 1, by the weights of now and without a cache."""

    async def unmatched(self, manifest: TransferManifest) -> Unmatched:
        """How the manifest differs from the model. Effect: none."""

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> None:
        """Leaves an older transfer group and becomes a member of the manifest's. Raises Unavailable."""

    async def begin_receive(self, *, deadline_seconds: float) -> None:
        """Starts to receive one publication.

        On CPU it is kept aside from the model. On CUDA it is loaded in place while it arrives: the model is torn from
        the first bucket on, until `load` has ended.
        """

    async def received(self) -> Received:
        """Waits for the end of the receive. Raises Expired or Unavailable when it broke: the model is as it was on CPU,
        torn on CUDA until a complete update.
        """

    async def load(self, policy_version: int) -> None:
        """Ends what the receive began: what was kept aside is put into the model, and all of it is seen to be filled.
        Drops cached keys and values, and stamps samples with the version. Keys and values that sleep go on sleeping.
        """

    async def give_up_receive(self) -> None:
        """Leaves the group and drops what was received. The model is then as `received` says of one that broke."""

    async def memory(self) -> Sequence[DeviceMemory]:
        """Each GPU the engine computes on, asked of its workers now; nothing on CPU."""

    async def sleep(self, *, discard_weights: bool) -> None:
        """Gives up the memory of weights and of keys and values, and drops what was cached. The engine must be idle.

        The weights are kept in memory of the host unless they may be discarded. What sleeps already is left as it is.
        On CPU only the engine's scheduler sleeps. Whatever is raised leaves the engine dead.
        """

    async def wake(self, tags: Collection[MemoryTag], *, deadline_seconds: float) -> None:
        """Takes the memory of these sleeping tags again; the engine samples again once all are awake.

        Discarded weights come back without content. Whatever is raised, the deadline's too, leaves the engine dead.
        """

    async def close(self) -> None:
        """Ends the engine's processes."""
