"""One transfer group over gloo: a sender as the root and every receiver. What a transport offers to the two ends."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

from services.common.errors import AntiphonError, Expired, InvalidRequest, Unavailable
from services.common.weights.store import own_address

ROOT = 0
LOOK_AROUND = timedelta(seconds=0.05)  # how soon a wait hears of `close`


class Pending:
    """A message on its way. Its buffer must not be touched until `GlooGroup.wait` returned."""

    def __init__(self, work: torch.distributed.Work, buffer: torch.Tensor, what: str) -> None:
        self.work = work
        self.buffer = buffer
        self.what = what


class GlooGroup:
    """A private process group, apart from torch's default one.

    A peer that dies closes its connection, and a message that is late times out: both end the wait with an error, and
    the group is broken from then on. `close` may be called from another thread; it ends a wait under way.

    gloo has no abort: what closes the connections is that the last reference to the group goes. A message under way
    keeps it until it is through, at the latest until its deadline; nobody waits for that here.
    """

    def __init__(
        self,
        store: Store,
        *,
        address: str,
        prefix: str,
        rank: int,
        receiver_ranks: int,
        greeting: bytes,
        deadline_seconds: float,
    ) -> None:
        """Connects to all peers, compares `greeting` with the root's, and thereby warms the connections.

        `address` is the store's; `rank` is ROOT or 1 + receiver rank. Raises Unavailable when not everybody came in
        time, InvalidRequest when the greetings differ.
        """
        self.name = f"transfer group {prefix}, rank {rank} of {1 + receiver_ranks}"
        self._group: ProcessGroupGloo | None = None
        end = time.monotonic() + deadline_seconds
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=deadline_seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address))]
        try:
            self._group = ProcessGroupGloo(PrefixStore(prefix, store), rank, 1 + receiver_ranks, options)
        except RuntimeError as error:
            raise Unavailable(
                f"{self.name}: not everybody came within {deadline_seconds:.1f} s ({_first_line(error)}); "
                "make a new epoch over those who are alive"
            ) from None
        theirs = torch.tensor(list(greeting), dtype=torch.uint8)
        self.wait(self.broadcast(theirs, end, "the greeting"), end)
        if bytes(theirs.tolist()) != greeting:
            self.close()
            raise InvalidRequest(f"{self.name}: the sender's manifest is another one than the receiver's")

    def broadcast(self, buffer: torch.Tensor, end: float, what: str) -> Pending:
        """Starts to send `buffer` (1-D uint8) at the root, or to receive into it elsewhere; `end` is of time.monotonic.

        `what` names the message in errors.
        """
        group = self._group
        if group is None:
            raise Unavailable(f"{self.name}: closed before {what}; make a new epoch")
        options = BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.timeout = _left(end)
        try:
            return Pending(group.broadcast([buffer], options), buffer, what)
        except RuntimeError as error:
            raise self._failure(error, what, end) from None

    def wait(self, pending: Pending, end: float) -> torch.Tensor:
        """The buffer, once the message is through. Raises Expired at the deadline, Unavailable when a peer is gone."""
        while True:
            completed = pending.work.is_completed()
            try:
                pending.work.wait(min(_left(end), LOOK_AROUND))
                return pending.buffer
            except RuntimeError as error:  # it failed, or this look took as long as it may
                if self._group is None:
                    raise Unavailable(f"{self.name}: closed while {pending.what} was under way") from None
                if completed or time.monotonic() >= end:
                    raise self._failure(error, pending.what, end) from None

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        self._group = None

    def _failure(self, error: RuntimeError, what: str, end: float) -> AntiphonError:
        self.close()
        if time.monotonic() >= end - 0.01:
            return Expired(f"{self.name}: {what} was not through at the deadline; make a new epoch")
        return Unavailable(f"{self.name}: a peer went away during {what} ({_first_line(error)}); make a new epoch")


def _left(end: float) -> timedelta:
    # gloo takes 0 for "no limit"
    return timedelta(seconds=max(end - time.monotonic(), 0.001))


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:300]
