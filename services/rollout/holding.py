"""How much may be asked for and held: finished trajectories stay until they are acknowledged, within these bounds.

Counted from the moment a trajectory is asked for, with the most that it may come to, so that what was begun always
has room for its end. A trajectory in memory takes nine bytes a token: its id, its log-probability, its mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import InvalidRequest, Overloaded

BYTES_PER_TOKEN = 9
BYTES_BESIDE = 500  # spans, ids and the objects around them
RETRY_AFTER_SECONDS = 1.0


def trajectory_bytes(tokens: int) -> int:
    """What a trajectory of so many tokens, prompt included, takes."""
    return BYTES_PER_TOKEN * tokens + BYTES_BESIDE


@dataclass
class Holding:
    """The trajectories asked for or finished, and their bytes."""

    most_trajectories: int
    most_bytes: int
    trajectories: int = 0
    bytes: int = 0

    def reserve(self, trajectories: int, size: int) -> None:
        """Takes room; give it back with `release`, in parts if you like.

        Raises InvalidRequest for what never fits, Overloaded when there is no room now.
        """
        if trajectories > self.most_trajectories or size > self.most_bytes:
            raise InvalidRequest(
                f"{trajectories} trajectories of at most {size} bytes: this worker holds at most "
                f"{self.most_trajectories} and {self.most_bytes} bytes (hold_trajectories, hold_mib); ask for fewer"
            )
        if self.trajectories + trajectories > self.most_trajectories or self.bytes + size > self.most_bytes:
            raise Overloaded(
                f"{self.trajectories} trajectories ({self.bytes} bytes at most) are being sampled or wait to be "
                f"acknowledged; with {trajectories} more ({size} bytes) they exceed {self.most_trajectories} or "
                f"{self.most_bytes} bytes (hold_trajectories, hold_mib): acknowledge what is durable",
                RETRY_AFTER_SECONDS,
            )
        self.trajectories += trajectories
        self.bytes += size

    def release(self, trajectories: int, size: int) -> None:
        self.trajectories -= trajectories
        self.bytes -= size
