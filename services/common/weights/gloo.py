"""A transfer group over gloo: weights in the memory of hosts, over TCP."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from services.common.errors import AntiphonError, Unavailable
from services.common.weights.store import LOOK_SECONDS, Meeting, own_address
from services.common.weights.transport import ROOT, Pending, first_line, late


class GlooGroup:
    """See services/common/weights/transport.py.

    A peer that dies closes its connection. gloo has no abort: what closes the connections is that the last reference to
    the group goes. A message under way keeps it until it is through, at the latest until its deadline; nobody waits for
    that here.
    """

    reuses_memory = False

    def __init__(self, meeting: Meeting, rank: int, size: int, *, address: str, end: float) -> None:
        """Connects to all members, who have all come; `address` is the store's."""
        self._meeting = meeting
        options = ProcessGroupGloo._Options()
        options._timeout = _left(end)
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address))]
        self._group: ProcessGroupGloo | None = None
        try:
            self._group = ProcessGroupGloo(PrefixStore("gloo", meeting.store), rank, size, options)
        except RuntimeError as error:
            raise Unavailable(
                f"{meeting.name}: not everybody came to be connected ({first_line(error)}); "
                "make a new epoch over those who are alive"
            ) from None

    def buffer(self, number: int, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, number: int, message: torch.Tensor, end: float, what: str) -> Pending:
        return self._broadcast(number, message, end, what)

    def receive(self, number: int, size: int, end: float, what: str) -> Pending:
        return self._broadcast(number, torch.empty(size, dtype=torch.uint8), end, what)

    def wait(self, pending: Pending, end: float) -> torch.Tensor:
        assert pending.work is not None
        while True:
            completed = pending.work.is_completed()
            try:
                pending.work.wait(min(_left(end), timedelta(seconds=LOOK_SECONDS)))
                return pending.message
            except RuntimeError as error:  # it failed, or this look took as long as it may
                if self._group is None:
                    raise Unavailable(f"{self._meeting.name}: closed while {pending.what} was under way") from None
                if completed or time.monotonic() >= end:
                    raise self._failure(error, pending.what, end) from None
                self._meeting.check(pending.what)

    def release(self, pending: Pending) -> None:
        pass

    def close(self, why: str = "it left") -> None:
        if self._group is not None:
            self._group = None
            self._meeting.give_up(why)

    def _broadcast(self, number: int, message: torch.Tensor, end: float, what: str) -> Pending:
        group = self._group
        if group is None:
            raise Unavailable(f"{self._meeting.name}: closed before {what}; make a new epoch")
        options = BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.timeout = _left(end)
        try:
            return Pending(number, what, group.broadcast([message], options), message)
        except RuntimeError as error:
            raise self._failure(error, what, end) from None

    def _failure(self, error: RuntimeError, what: str, end: float) -> AntiphonError:
        if time.monotonic() >= end - 0.01:
            return late(self._meeting.name, what)
        try:
            self._meeting.check(what)  # who gave up says more than who lost the connection to it
        except Unavailable as told:
            return told
        return Unavailable(
            f"{self._meeting.name}: a peer went away during {what} ({first_line(error)}); make a new epoch"
        )


def _left(end: float) -> timedelta:
    # gloo takes 0 for "no limit"
    return timedelta(seconds=max(end - time.monotonic(), 0.001))
