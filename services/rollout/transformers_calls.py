"""What the service and the process of its embedded engine say to each other, over a pipe of multiprocessing.

Both ends are this service, started by it from the same files; nobody else can write to the pipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HELLO = 0
"""Id of the first reply: the engine's facts, or why there is none."""
BEAT_SECONDS = 0.5
"""How often the process says that its model moves, while it does."""


@dataclass(frozen=True)
class Call:
    """A method of the process, by name."""

    id: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The answer to a call: a value, or an error of services/common/errors.py by its name."""

    id: int
    value: Any = None
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class Beat:
    """A step was done."""
