"""The meeting place of a transfer group: a key-value store that the learner's rank 0 binds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from services.common.errors import InvalidRequest, Unavailable

Answer = TypeVar("Answer")

LOOK_SECONDS = 0.05
"""How soon a member that waits hears that another one gave up, or that the store is gone."""
COME_POLL_SECONDS = 0.002


def bind_store(host: str = "127.0.0.1") -> tuple[TCPStore, str]:
    """A store that listens on a free port of `host` only, and its "host:port". It lives as long as the object.

    The store has no authentication; left to itself it would listen on every interface.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


def connect_store(address: str, deadline_seconds: float) -> TCPStore:
    """A connection to the store at "host:port". Raises Unavailable when nothing answers in time."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), None, False, timedelta(seconds=deadline_seconds), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"transfer store at {address}: no answer within {deadline_seconds:.1f} s: {error}") from None


def own_address(peer: str) -> str:
    """The address of this host on the route to `peer` ("host:port"): where others on that route can reach it."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


class Meeting:
    """What the members of one group tell each other beside the weights: that they came, and why they gave up.

    The transports alone say little: NCCL and mapped memory wait for a peer that is gone until the deadline.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, left: threading.Event | None = None) -> None:
        """`left`: set by another thread when this member is not to go on."""
        self.name = f"transfer group {prefix}, rank {rank} of {size}"
        self.store = PrefixStore(prefix, store)
        self._rank = rank
        self._size = size
        self._left = left or threading.Event()
        self._looked = 0.0

    def come(self, greeting: bytes, end: float) -> None:
        """Waits until everybody came; `end` is of time.monotonic, `greeting` must be the root's (rank 0).

        Raises Unavailable naming who is missing at the end, InvalidRequest when somebody greets otherwise.
        """
        begin = time.monotonic()
        self.store.set(f"here/{self._rank}", greeting.hex())
        missing = list(range(self._size))
        while missing := [rank for rank in missing if not self._there(f"here/{rank}", "coming together")]:
            self.check("coming together")
            if time.monotonic() >= end:
                who = ", ".join("the learner's rank" if rank == 0 else f"receiver {rank - 1}" for rank in missing)
                raise Unavailable(
                    f"{self.name}: not everybody came within {end - begin:.1f} s, {who} did not; "
                    "make a new epoch over those who are alive"
                )
            time.sleep(COME_POLL_SECONDS)
        self._looked = 0.0
        self.check("coming together")  # somebody may have come and gone
        others = range(1, self._size) if self._rank == 0 else (0,)
        if any(self.store.get(f"here/{rank}") != greeting.hex().encode() for rank in others):
            raise InvalidRequest(f"{self.name}: the sender's manifest is another one than the receiver's")

    def give_up(self, why: str) -> None:
        """Lets the others know. Says so in the background: the store may be gone, or stand still."""
        threading.Thread(target=self._tell, args=(f"{self.name}: {why}",), daemon=True).start()

    def check(self, what: str) -> None:
        """Raises Unavailable with the words of the member that gave up first, when the store is gone, or when left.

        `what` is under way meanwhile. Looks only every LOOK_SECONDS, so it may be called as often as one likes.
        """
        if self._left.is_set():
            raise Unavailable(f"{self.name}: it was left during {what}")
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._there("gave up", what):
            told = self.ask(lambda store: store.get("gave up"), what).decode()
            raise Unavailable(f"{self.name}: given up during {what}: {told}; make a new epoch")

    def ask(self, question: Callable[[Store], Answer], what: str) -> Answer:
        """What the store answers. Raises Unavailable when it is gone, and with it the learner's rank 0."""
        try:
            return question(self.store)
        except RuntimeError:
            raise Unavailable(
                f"{self.name}: a peer went away during {what}: the learner's store is gone; make a new epoch"
            ) from None

    def _there(self, key: str, what: str) -> bool:
        return self.ask(lambda store: bool(store.check([key])), what)

    def _tell(self, text: str) -> None:
        try:
            if not self.store.check(["gave up"]):
                self.store.set("gave up", text)
        except RuntimeError:
            pass  # then they know
