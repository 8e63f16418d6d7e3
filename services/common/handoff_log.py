"""One subject of the stream `handoff` as it is read, folded and appended to, and what the stream has to be for that.

What is read decides nothing but what to append; the append decides, by the sequence that it expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from antiphon.events.v1 import handoff_pb2
from google.protobuf.message import DecodeError

from services.common.errors import Conflict, Unavailable

logger = logging.getLogger(__name__)

CLAIMS_SUBJECT = "handoff.claims"
# NATS discards the oldest of more. A fold begins at the last Grant or Claim; between two of them there are a few facts
# per tenant, each said once, and a reader that finds more there refuses to say what is true.
MESSAGES_PER_SUBJECT = 1024
# News may be lost; a reader that waits looks again after this.
LOOK_AGAIN_SECONDS = 1.0
_NONCES_KEPT = 1024


def node_subject(node: str) -> str:
    """The subject of a node; a host's name may have dots, which separate the parts of a subject."""
    return f"handoff.node.{quote(node, safe='').replace('.', '%2E')}"


class Refused(Conflict):
    """The subject's last message is not the one that was expected: somebody appended in between. Nothing was stored."""


class Store(Protocol):
    """One stream, as little of it as is needed."""

    async def epoch(self) -> str:
        """Identity of the stream; a missing one is made. Raises Unavailable."""
        ...

    async def publish(self, subject: str, data: bytes, expected: int | None) -> int:
        """Stores a message and answers its sequence; with `expected` only after that sequence of its subject.

        Raises Refused (nothing was stored), Unavailable (nothing was), TimeoutError (not known).
        """
        ...

    async def next(self, subject: str, after: int) -> tuple[int, bytes] | None:
        """The first message of a subject after a sequence, with its own; None without one. Raises Unavailable."""
        ...

    def news(self, subject: str) -> asyncio.Event:
        """Set when the next message of the subject is stored, if word of it is not lost."""
        ...


class State(Protocol):
    """A fold: services/common/grants.py."""

    @property
    def epoch(self) -> str: ...

    @property
    def sequence(self) -> int: ...

    def says_all(self, entry: handoff_pb2.HandoffEntry) -> bool: ...


Folded = TypeVar("Folded", bound=State)


class SubjectLog(Generic[Folded]):
    """One subject, folded. `state` is what was read last; `empty` makes the state of an epoch without messages."""

    def __init__(
        self,
        store: Store,
        subject: str,
        empty: Callable[[str], Folded],
        apply: Callable[[Folded, int, handoff_pb2.HandoffEntry], Folded],
    ) -> None:
        self.subject = subject
        self._store = store
        self._empty = empty
        self._apply = apply
        self.state = empty("")
        # The fold as far as it has come; `state` once it is known that no message is missing in it.
        self._so_far = self.state
        # Messages since the fold was known to be whole.
        self._unsure = 0
        # Nonces of this epoch's newest messages, for the writer whose answer was lost.
        self._nonces: OrderedDict[str, int] = OrderedDict()
        self._reading = asyncio.Lock()

    async def refresh(self) -> Folded:
        """Reads whatever was appended since; the state then is that of a moment after the call began.

        A stream made anew begins an empty state with its own epoch. Raises Unavailable: NATS is away, or messages may
        have been discarded unread, so that nobody can say from here who holds what.
        """
        async with self._reading:
            self._enter(await self._store.epoch())
            while True:
                message = await self._store.next(self.subject, self._so_far.sequence)
                if message is None:
                    self._require_whole()
                    return self.state
                sequence, data = message
                entry = _entry(data, self.subject, sequence)
                if entry.epoch != self._so_far.epoch:
                    # Either this message was late for a stream that is gone, or this reader is.
                    epoch = await self._store.epoch()
                    if epoch != self._so_far.epoch:
                        self._enter(epoch)
                        continue
                self._so_far = self._apply(self._so_far, sequence, entry)
                self._unsure = 0 if self._so_far.says_all(entry) else self._unsure + 1
                self._nonces[entry.nonce] = sequence
                if len(self._nonces) > _NONCES_KEPT:
                    self._nonces.popitem(last=False)

    async def append(self, entry: handoff_pb2.HandoffEntry, decided_on: Folded | None = None) -> int:
        """Appends the entry and answers its sequence; with `decided_on`, only if nothing came after that state.

        Its epoch and a new nonce are filled in. Raises Refused; Unavailable when it is not known to be stored (it may
        be yet: look at the log before anything else).
        """
        state = self.state if decided_on is None else decided_on
        entry.epoch = state.epoch
        entry.nonce = uuid.uuid4().hex
        expected = None if decided_on is None else decided_on.sequence
        try:
            return await self._store.publish(self.subject, entry.SerializeToString(), expected)
        except TimeoutError:
            await self.refresh()
            if (sequence := self._nonces.get(entry.nonce)) is not None:
                return sequence
            kind = entry.WhichOneof("entry")
            raise Unavailable(
                f"{self.subject}: NATS did not say that it stored a {kind}, it is not there yet"
            ) from None

    async def wait_for(self, condition: Callable[[Folded], bool]) -> Folded:
        """The first state that fulfils the condition, as far as it is noticed. The caller sets the deadline.

        While NATS is away it waits for it.
        """
        while True:
            news = self._store.news(self.subject)
            try:
                state = await self.refresh()
            except Unavailable as error:
                logger.info("%s: not read: %s", self.subject, error)
            else:
                if condition(state):
                    return state
            await until_news(news)

    def news(self) -> asyncio.Event:
        """As Store.news."""
        return self._store.news(self.subject)

    def _require_whole(self) -> None:
        """At the subject's end. A message is discarded only when MESSAGES_PER_SUBJECT came after it: whoever read fewer
        missed none.
        """
        if self._unsure >= MESSAGES_PER_SUBJECT:
            raise Unavailable(
                f"{self.subject}: its last {self._unsure} messages have no Grant or Claim among them and NATS keeps "
                f"{MESSAGES_PER_SUBJECT}, so who holds what may be discarded. The next hand-over by a run that has "
                "read all of them mends it; otherwise see who wrote them (nats stream view handoff), stop the runs "
                "that use GPUs, and delete the stream handoff: it is made anew"
            )
        self._unsure = 0
        self.state = self._so_far

    def _enter(self, epoch: str) -> None:
        if epoch == self._so_far.epoch:
            return
        if self._so_far.epoch:
            logger.error(
                "%s: NATS lost the stream and it was made anew: epoch %s became %s; all grants and claims are void",
                self.subject,
                self._so_far.epoch,
                epoch,
            )
        self.state = self._so_far = self._empty(epoch)
        self._unsure = 0
        self._nonces.clear()


async def until_news(news: asyncio.Event, seconds: float = LOOK_AGAIN_SECONDS) -> None:
    """Waits for the event, or for as long as one must not rely on it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


def _entry(data: bytes, subject: str, sequence: int) -> handoff_pb2.HandoffEntry:
    """What somebody else put on the subject is void, as a message of another epoch is."""
    try:
        return handoff_pb2.HandoffEntry.FromString(data)
    except DecodeError:
        logger.error("%s: message %d is no HandoffEntry; it is passed over", subject, sequence)
        return handoff_pb2.HandoffEntry()
