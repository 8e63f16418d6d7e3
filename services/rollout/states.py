"""The life of a rollout worker: its states, the moves allowed, and the one function that moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from antiphon.tenant.v1.tenant_pb2 import WorkerState
from antiphon.types.v1.policy_pb2 import Policy

from services.common.errors import Unavailable

logger = logging.getLogger(__name__)

STARTING = WorkerState.WORKER_STATE_STARTING
STALE = WorkerState.WORKER_STATE_STALE
UPDATING = WorkerState.WORKER_STATE_UPDATING
READY = WorkerState.WORKER_STATE_READY
STOPPING = WorkerState.WORKER_STATE_STOPPING
FAILED = WorkerState.WORKER_STATE_FAILED
ASLEEP = WorkerState.WORKER_STATE_ASLEEP

# state: (states that may follow, what a refused caller is told)
_TABLE: dict[WorkerState, tuple[frozenset[WorkerState], str]] = {
    STARTING: (frozenset({STALE, STOPPING, FAILED}), "the engine is starting"),
    STALE: (
        frozenset({UPDATING, ASLEEP, STOPPING, FAILED}),
        "its weights are not a verified policy, it waits for an update",
    ),
    UPDATING: (frozenset({READY, STALE, STOPPING, FAILED}), "an update is under way"),
    READY: (frozenset({UPDATING, ASLEEP, STOPPING, FAILED}), "it works"),
    ASLEEP: (frozenset({READY, STALE, STOPPING, FAILED}), "its memory sleeps, it waits for a Wake"),
    STOPPING: (frozenset({FAILED}), "it is stopping"),
    FAILED: (frozenset(), "its engine is dead"),
}


def name(state: WorkerState) -> str:
    """ "STALE" for WORKER_STATE_STALE."""
    return WorkerState.Name(state).removeprefix("WORKER_STATE_")


class Life:
    """Where the worker is in its life, and the last policy it verified. `on_change` is called after every move."""

    def __init__(self) -> None:
        self.state = STARTING
        self.reason = ""
        self.policy: Policy | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def move(self, state: WorkerState, reason: str = "", *, verified: Policy | None = None) -> None:
        """Goes to `state`; READY needs the policy that was verified. A move that the table lacks is a bug."""
        if state not in _TABLE[self.state][0]:
            raise RuntimeError(f"no way from {name(self.state)} to {name(state)}")
        if (state == READY) != (verified is not None):
            raise RuntimeError(f"{name(state)} with policy {verified}: READY, and only it, is a verified policy")
        log = logger.warning if state == FAILED or (self.state, state) == (UPDATING, STALE) else logger.info
        log("%s -> %s%s", name(self.state), name(state), f": {reason}" if reason else "")
        self.state = state
        self.reason = reason
        self.policy = verified or self.policy
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    async def wait_change(self) -> None:
        """Waits for the next move."""
        await self._changed.wait()

    def refusal(self) -> Unavailable:
        """The error for work that is not done in this state."""
        reason = f" ({self.reason})" if self.reason else ""
        return Unavailable(f"{name(self.state)}: {_TABLE[self.state][1]}{reason}; ask another worker")
