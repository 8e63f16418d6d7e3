"""The transfer group that an engine is a member of: one at a time, or none."""

from __future__ import annotations

from services.rollout.engine import Engine

NO_EPOCH = -1


class TransferGroup:
    """Membership in one epoch. What maps the learner's memory, or keeps a transfer, is held as long as it lasts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.epoch = NO_EPOCH
        """The newest that was entered, joined or not."""
        self.joined = False

    async def leave(self) -> None:
        """Idempotent. Raises what the engine raises."""
        self.joined = False
        await self._engine.give_up_receive()
