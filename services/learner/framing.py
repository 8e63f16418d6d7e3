"""Messages between the learner's parent and a rank: one protobuf message a frame (services/common/framing.py)."""

from __future__ import annotations

import asyncio
import socket
from typing import TypeVar

from google.protobuf.message import Message

from services.common import framing

Received = TypeVar("Received", bound=Message)

LONGEST_BYTES = (1 << 31) - 1  # protobuf's own limit of one message
BESIDE_OTHER_WORK = ("connect_transfer", "memory")
"""Commands that a rank does in a thread of their own, while it goes on with others."""


def framed(message: Message) -> bytes:
    """The bytes of one message on the wire. Raises ValueError for one that protobuf could not read back."""
    data = message.SerializeToString()
    if len(data) > LONGEST_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes is longer than protobuf's {LONGEST_BYTES}")
    return framing.framed(data)


async def read_message(reader: asyncio.StreamReader, kind: type[Received]) -> Received | None:
    """The next message; None at the end of the stream, in the middle of a message too."""
    try:
        return kind.FromString(await framing.read_frame(reader, LONGEST_BYTES))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_message(connection: socket.socket, kind: type[Received]) -> Received | None:
    """The same on a blocking socket."""
    data = framing.receive_frame(connection)
    return None if data is None else kind.FromString(data)
