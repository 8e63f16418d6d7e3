"""The meeting place of a transfer group: a key-value store that the learner's rank 0 binds."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from services.common.errors import Unavailable


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
