"""Messages on the socket between the learner's parent and a rank."""

from __future__ import annotations

import asyncio
import socket

import pytest
from antiphon.learner.v1 import ranks_pb2

from services.learner.framing import framed, read_message, receive_message


def message(size: int) -> ranks_pb2.RankReply:
    return ranks_pb2.RankReply(id=7, failure=ranks_pb2.RankFailure(message="x" * size))


def test_the_bytes_by_hand():
    assert framed(ranks_pb2.RankReply(id=5)) == b"\x00\x00\x00\x02\x08\x05"
    assert framed(ranks_pb2.RankReply()) == b"\x00\x00\x00\x00"


@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_blocking_end(size):
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(5)
        right.settimeout(5)

        def send() -> None:
            left.sendall(framed(message(size)) + framed(message(1)))

        import threading

        thread = threading.Thread(target=send)
        thread.start()
        assert receive_message(right, ranks_pb2.RankReply) == message(size)
        assert receive_message(right, ranks_pb2.RankReply) == message(1)
        thread.join()
        left.sendall(framed(message(100))[:50])
        left.close()
        assert receive_message(right, ranks_pb2.RankReply) is None


async def test_asyncio_end():
    reader = asyncio.StreamReader()
    reader.feed_data(framed(message(200_000)) + framed(message(2))[:9])
    reader.feed_eof()
    assert await read_message(reader, ranks_pb2.RankReply) == message(200_000)
    assert await read_message(reader, ranks_pb2.RankReply) is None
