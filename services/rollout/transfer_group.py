"""The transfer group that an engine is a member of: one at a time, or none."""

from __future__ import annotations

from services.common.errors import Conflict
from services.rollout.engine import Engine

NO_EPOCH = -1
LONGEST_STEP = 2**44
"""How far an epoch may be above the newest that was entered. After the last of int64 nobody could join any more; from
here it is half a million steps away, and an epoch that is a time in milliseconds is within one."""


class TransferGroup:
    """Membership in one epoch. What maps the learner's memory, or keeps a transfer, is held as long as it lasts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.epoch = NO_EPOCH
        """The newest that was entered, joined or not."""
        self.joined = False

    def require_follows(self, epoch: int) -> None:
        """Raises Conflict unless a group of this epoch may be joined after the newest that was entered."""
        if epoch < self.epoch:
            raise Conflict(
                f"JoinTransfer: epoch {epoch} is over; this worker is in epoch {self.epoch}, join a later one"
            )
        if epoch > max(self.epoch, 0) + LONGEST_STEP:
            raise Conflict(
                f"JoinTransfer: epoch {epoch} is more than {LONGEST_STEP} above {max(self.epoch, 0)}, where this "
                f"worker is, and leaves little room for those after it; join epoch {max(self.epoch, 0) + 1}"
            )

    async def leave(self) -> None:
        """Idempotent. Raises what the engine raises."""
        self.joined = False
        await self._engine.give_up_receive()
