"""Messages between the learner's parent and a rank: protobuf, each prefixed by its length (4 bytes, big endian)."""

from __future__ import annotations

import asyncio
import socket
from typing import TypeVar

from google.protobuf.message import Message

Received = TypeVar("Received", bound=Message)

PREFIX_BYTES = 4
LONGEST_BYTES = (1 << 31) - 1  # protobuf's own limit of one message
BESIDE_OTHER_WORK = ("connect_transfer", "memory")
"""Commands that a rank does in a thread of their own, while it goes on with others."""


def framed(message: Message) -> bytes:
    """The bytes of one message on the wire. Raises ValueError for one that protobuf could not read back."""
    data = message.SerializeToString()
    if len(data) > LONGEST_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes is longer than protobuf's {LONGEST_BYTES}")
    return len(data).to_bytes(PREFIX_BYTES, "big") + data


async def read_message(reader: asyncio.StreamReader, kind: type[Received]) -> Received | None:
    """The next message; None at the end of the stream, in the middle of a message too."""
    try:
        length = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "big")
        return kind.FromString(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_message(connection: socket.socket, kind: type[Received]) -> Received | None:
    """The same on a blocking socket."""
    prefix = _receive_exactly(connection, PREFIX_BYTES)
    data = None if prefix is None else _receive_exactly(connection, int.from_bytes(prefix, "big"))
    return None if data is None else kind.FromString(bytes(data))


def _receive_exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        try:
            received = connection.recv_into(view[filled:])
        except ConnectionError:
            return None
        if received == 0:
            return None
        filled += received
    return data
