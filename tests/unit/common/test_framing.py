"""Frames on a socket, at both kinds of ends."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from services.common.framing import framed, read_frame, receive_frame, send_frame


def test_the_bytes_by_hand():
    assert framed(b"ab") == b"\x00\x00\x00\x02ab"
    assert framed(b"") == b"\x00\x00\x00\x00"
    assert framed(b"x" * 65_537)[:4] == b"\x00\x01\x00\x01"


def test_a_blocking_end_takes_frames_of_any_size_until_the_other_is_gone():
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(5)
        frames = [b"", b"a", b"b" * 1_000_000]  # more than the socket's buffer holds

        def send() -> None:
            for frame in frames:
                send_frame(left, frame)
            left.sendall(framed(b"c" * 100)[:50])
            left.close()

        thread = threading.Thread(target=send)
        thread.start()
        assert [receive_frame(right) for _ in frames] == frames
        assert receive_frame(right) is None
        thread.join(5)


def test_a_connection_that_is_reset_is_gone_too():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname(), timeout=5)
        theirs, _ = listening.accept()
        with ours:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
            theirs.close()
            assert receive_frame(ours) is None


async def test_an_asyncio_end_refuses_what_is_too_long_and_says_when_it_is_cut():
    reader = asyncio.StreamReader()
    reader.feed_data(framed(b"x" * 200_000) + framed(b"12345") + framed(b"y" * 9)[:9])
    reader.feed_eof()
    assert await read_frame(reader, 200_000) == b"x" * 200_000
    assert await read_frame(reader, 5) == b"12345"
    with pytest.raises(asyncio.IncompleteReadError):
        await read_frame(reader, 9)
    longer = asyncio.StreamReader()
    longer.feed_data(framed(b"123456"))
    with pytest.raises(ValueError, match="a frame of 6 bytes; at most 5"):
        await read_frame(longer, 5)
