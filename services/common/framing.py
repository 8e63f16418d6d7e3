"""Frames on a stream between a service and its children: 4 bytes of length, big endian, then that many bytes."""

from __future__ import annotations

import asyncio
import socket

PREFIX_BYTES = 4


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(PREFIX_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """The next frame. Raises IncompleteReadError at the end of the stream, ValueError for a longer frame."""
    size = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "big")
    if size > most_bytes:
        raise ValueError(f"a frame of {size} bytes; at most {most_bytes}")
    return await reader.readexactly(size)


def send_frame(channel: socket.socket, data: bytes) -> None:
    """Blocks until it is on its way."""
    channel.sendall(framed(data))


def receive_frame(channel: socket.socket) -> bytes | None:
    """Blocks until the next frame is there; None when the other end is gone, in the middle of a frame too."""
    prefix = _exactly(channel, PREFIX_BYTES)
    return None if prefix is None else _exactly(channel, int.from_bytes(prefix, "big"))


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        try:
            received = channel.recv_into(view[filled:])
        except ConnectionError:
            return None
        if received == 0:
            return None
        filled += received
    return bytes(data)
