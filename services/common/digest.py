"""SHA-256 over a series of protobuf messages: what the sender of a stream says it sent and the receiver checks.

And over a vocabulary: whether token ids mean the same at both ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

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


def digest_vocabulary(vocabulary: Mapping[str, int]) -> bytes:
    """32 bytes over every token and its id, added tokens included: {token: id}, as tokenizer.json has them.

    By rising id: the id and the length of the token's UTF-8 (8 bytes each, big endian), and that UTF-8.
    """
    sha = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        data = token.encode("utf-8", "surrogatepass")
        sha.update(number.to_bytes(8, "big") + len(data).to_bytes(8, "big") + data)
    return sha.digest()
