"""SHA-256 over a series of protobuf messages: what the sender of a stream says it sent and the receiver checks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from google.protobuf.message import Message


def digest_messages(messages: Iterable[Message]) -> bytes:
    """32 bytes over each message's deterministic serialisation, prefixed by its length (8 bytes, big endian).

    The messages must hold no maps and no unknown fields, so that two builds serialise them alike.
    """
    sha = hashlib.sha256()
    for message in messages:
        data = message.SerializeToString(deterministic=True)
        sha.update(len(data).to_bytes(8, "big"))
        sha.update(data)
    return sha.digest()
