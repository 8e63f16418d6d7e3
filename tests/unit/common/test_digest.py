from __future__ import annotations

import hashlib

from antiphon.types.v1 import chat_pb2, policy_pb2

from services.common.digest import digest_messages, digest_vocabulary


def test_the_digest_is_what_the_docstring_says() -> None:
    # Written by hand from the protobuf encoding: field 1, length-delimited (tag 0x0a), packed varints.
    first = bytes([0x0A, 0x03, 0x01, 0x02, 0x03])  # ids: 1, 2, 3
    second = b""  # nothing set
    third = bytes([0x0A, 0x02, 0xAC, 0x02])  # ids: 300
    expected = hashlib.sha256(
        b"\0\0\0\0\0\0\0\x05" + first + b"\0\0\0\0\0\0\0\0" + second + b"\0\0\0\0\0\0\0\x04" + third
    ).digest()
    messages = [chat_pb2.TokenIds(ids=[1, 2, 3]), chat_pb2.TokenIds(), chat_pb2.TokenIds(ids=[300])]
    assert digest_messages(messages) == expected
    assert digest_messages(iter(messages)) == expected


def test_order_borders_and_number_of_messages_count() -> None:
    def ids(*groups: list[int]) -> bytes:
        return digest_messages(chat_pb2.TokenIds(ids=group) for group in groups)

    digests = [ids([1], [2]), ids([2], [1]), ids([1, 2]), ids([1, 2], []), ids([], [1, 2]), ids()]
    assert len(set(digests)) == len(digests)
    assert ids() == hashlib.sha256(b"").digest()


def test_the_fixed64_of_a_policy_is_in_it() -> None:
    assert digest_messages([policy_pb2.Policy(version=1, digest=5)]) != digest_messages([policy_pb2.Policy(version=1)])


def test_the_digest_of_a_vocabulary_is_what_its_docstring_says() -> None:
    expected = hashlib.sha256(
        b"\0\0\0\0\0\0\0\x02" + b"\0\0\0\0\0\0\0\x02" + "é".encode() + b"\0\0\0\0\0\0\0\x05" + b"\0\0\0\0\0\0\0\x01a"
    ).digest()
    assert digest_vocabulary({"a": 5, "é": 2}) == digest_vocabulary({"é": 2, "a": 5}) == expected
    assert digest_vocabulary({"a": 2, "é": 5}) != expected
