"""The stream `handoff` on a NATS server.

Reads go to the stream's leader, one message after another. What NATS republishes after storing only says when to read
again, so nothing is missed when it is lost; nats-py's consumers end neither with a restarted server nor with a stream
made anew.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, Header, RePublish, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from services.common.bus import AWAY, Bus, end_if_cancelled
from services.common.errors import ConfigError, Unavailable
from services.common.handoff_log import MESSAGES_PER_SUBJECT, Refused

logger = logging.getLogger(__name__)

STREAM = "handoff"
_STORED = "handoff-stored"
_EPOCH_KEY = "antiphon_epoch"
_NAME_IN_USE = 10058
_WRONG_LAST_SEQUENCE = 10071


class JetStreamStore:
    """Store: stored in a file, synced on every write (Bus asserts that), its history bounded."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._news: dict[str, asyncio.Event] = {}

    @classmethod
    async def open(cls, bus: Bus) -> JetStreamStore:
        """Makes the stream if it is missing and listens for news. Raises ConfigError (other settings), Unavailable."""
        store = cls(bus)
        try:
            await store.epoch()
            await bus.connection.subscribe(f"{_STORED}.>", cb=store._heard)
        except AWAY as error:
            raise Unavailable(f"NATS: {error!r}") from None
        end_if_cancelled()
        return store

    async def epoch(self) -> str:
        try:
            try:
                info = await self._bus.jetstream.stream_info(STREAM)
            except NotFoundError:
                info = await self._make()
        except AWAY as error:
            raise Unavailable(f"stream {STREAM}: NATS does not answer: {error!r}") from None
        end_if_cancelled()
        return _checked(info.config)

    async def publish(self, subject: str, data: bytes, expected: int | None) -> int:
        headers = {Header.EXPECTED_STREAM.value: STREAM}
        if expected is not None:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(expected)
        try:
            acknowledged = await self._bus.jetstream.publish(subject, data, headers=headers)
        except TimeoutError:
            end_if_cancelled()
            raise
        except APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise Refused(f"{subject}: expected {expected} as the last message, and it is not ({error})") from None
            raise Unavailable(f"{subject}: NATS stored nothing: {error}") from None
        except (NoStreamResponseError, nats.errors.OutboundBufferLimitError) as error:
            # The stream is gone, or the connection is: then nothing is kept to be sent later (Bus).
            raise Unavailable(f"{subject}: NATS stored nothing: {error!r}") from None
        except AWAY as error:
            end_if_cancelled()
            raise TimeoutError(f"{subject}: {error!r}") from None
        end_if_cancelled()
        return int(acknowledged.seq)

    async def next(self, subject: str, after: int) -> tuple[int, bytes] | None:
        try:
            message = await self._bus.jetstream.get_msg(STREAM, seq=after + 1, subject=subject, next=True)
        except NotFoundError:  # no such message, or no such stream: whoever asks for the epoch sees which
            return None
        except AWAY as error:
            raise Unavailable(f"{subject}: NATS does not answer: {error!r}") from None
        finally:
            end_if_cancelled()
        return int(message.seq), message.data or b""

    def news(self, subject: str) -> asyncio.Event:
        return self._news.setdefault(subject, asyncio.Event())

    async def _heard(self, message: Msg) -> None:
        subject = STREAM + message.subject.removeprefix(_STORED)
        if (event := self._news.pop(subject, None)) is not None:
            event.set()

    async def _make(self) -> StreamInfo:
        config = StreamConfig(
            name=STREAM,
            subjects=[f"{STREAM}.>"],
            storage=StorageType.FILE,
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.OLD,
            max_msgs_per_subject=MESSAGES_PER_SUBJECT,
            metadata={_EPOCH_KEY: uuid.uuid4().hex},
            # Told after storing, so that whoever hears it finds the message.
            republish=RePublish(src=f"{STREAM}.>", dest=f"{_STORED}.>", headers_only=True),
        )
        try:
            info = await self._bus.jetstream.add_stream(config)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            return await self._bus.jetstream.stream_info(STREAM)  # somebody else made it just now
        logger.info("made the stream %s, epoch %s", STREAM, config.metadata[_EPOCH_KEY] if config.metadata else "")
        return info


def _checked(config: StreamConfig) -> str:
    """The epoch of a stream with the settings that grants rely on. Raises ConfigError."""
    epoch = str((config.metadata or {}).get(_EPOCH_KEY, ""))
    wanted = {
        "storage": StorageType.FILE.value,
        "retention": RetentionPolicy.LIMITS.value,
        "discard": DiscardPolicy.OLD.value,
        "max_msgs_per_subject": MESSAGES_PER_SUBJECT,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "persist_mode": None,
    }
    got = {name: getattr(config, name) for name in wanted}
    wrong = [f"{name} {got[name]!r} instead of {value!r}" for name, value in wanted.items() if got[name] != value]
    if not epoch or wrong:
        problem = ", ".join(wrong) or f"no {_EPOCH_KEY} in its metadata"
        raise ConfigError(f"NATS stream {STREAM}: {problem}; delete it when no run is using GPUs, it is made anew")
    return epoch
