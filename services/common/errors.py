"""The errors of the contracts. Domain code raises these; services/common/status.py carries them over gRPC, both ways.

Anything else that is raised is a bug: the server logs its traceback once and answers INTERNAL.
"""

from __future__ import annotations

from typing import ClassVar


class AntiphonError(Exception):
    """An error with a stable code. The message says what was expected, what came, which id, and what to do next."""

    code: ClassVar[str] = "ANT-ERROR"
    worker_id: str = ""
    """The worker that had it, where that is known: its log says more."""
    answered: bool = True
    """False where it is no answer of a worker: the connection broke, or there was none."""


class InvalidRequest(AntiphonError):
    """The request can never succeed as it is."""

    code = "ANT-INVALID-REQUEST"


class NotFound(AntiphonError):
    """Nothing has that name or id."""

    code = "ANT-NOT-FOUND"


class Conflict(AntiphonError):
    """Wrong state, stale version, stale epoch, stale token: look at the state before asking again."""

    code = "ANT-CONFLICT"


class Overloaded(AntiphonError):
    """No room now; the same request may be sent again, elsewhere first, after `retry_after_seconds`."""

    code = "ANT-OVERLOADED"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(AntiphonError):
    """The worker cannot answer now (starting, stale, stopping, a child is dead); elsewhere it may succeed."""

    code = "ANT-UNAVAILABLE"


class Expired(AntiphonError):
    """A deadline passed. What was under way may or may not have taken effect."""

    code = "ANT-EXPIRED"


class ConfigError(AntiphonError):
    """The configuration is wrong; nothing was started."""

    code = "ANT-CONFIG"


class Internal(AntiphonError):
    """A bug in the peer; its log holds the traceback."""

    code = "ANT-INTERNAL"
