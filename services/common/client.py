"""Calls to other services: one channel per peer, a deadline on every call, retries that carry the same request id."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc

from services.common import trace
from services.common.errors import Overloaded, Unavailable
from services.common.status import from_rpc_error

Answer = TypeVar("Answer")

# A short keepalive timeout alone has no effect: grpc.http2.ping_timeout_ms rules, and its default is 60 s.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]


def new_request_id() -> str:
    """An id for a mutating request; a retry of the request carries the same one."""
    return uuid.uuid4().hex


class Peer:
    """A channel to one worker. `name` is the worker id, for messages."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=_interceptors())

    async def close(self) -> None:
        await self.channel.close()

    async def call(self, method: Callable[..., Awaitable[Answer]], request: Any, *, deadline_seconds: float) -> Answer:
        """One unary answer (the request may be an iterator). Raises an error of services/common/errors.py."""
        try:
            return await method(request, timeout=deadline_seconds)
        except grpc.aio.AioRpcError as error:
            raise await from_rpc_error(error, self._where(method)) from None

    async def stream(
        self, method: Callable[..., AsyncIterator[Answer]], request: Any, *, deadline_seconds: float
    ) -> AsyncIterator[Answer]:
        """The messages of a streamed answer (the request may be an iterator). Leaving the loop cancels the call."""
        call = method(request, timeout=deadline_seconds)
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise await from_rpc_error(error, self._where(method)) from None
        finally:
            call.cancel()  # type: ignore[attr-defined]

    def _where(self, method: Any) -> str:
        name = getattr(method, "_method", b"")
        text = name.decode() if isinstance(name, bytes) else str(name)
        return f"{self.name} ({self.address}) {text.rsplit('/', 1)[-1]}".rstrip()


async def retried(
    attempt: Callable[[], Awaitable[Answer]],
    *,
    deadline_seconds: float,
    first_pause_seconds: float = 0.1,
    longest_pause_seconds: float = 5.0,
) -> Answer:
    """Repeats `attempt` while it says Unavailable or Overloaded, with growing pauses, until the deadline.

    The attempt must be safe to repeat: it carries one request id, made before. The last error is raised.
    """
    end = time.monotonic() + deadline_seconds
    pause = first_pause_seconds
    while True:
        try:
            return await attempt()
        except (Unavailable, Overloaded) as error:
            wait = max(pause * random.uniform(0.5, 1.0), getattr(error, "retry_after_seconds", 0.0))
            if time.monotonic() + wait >= end:
                raise
        await asyncio.sleep(wait)
        pause = min(pause * 2, longest_pause_seconds)


class MissingDeadline(RuntimeError):
    """A call was made without a deadline: a bug of the caller."""


def _prepared(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    if details.timeout is None:
        raise MissingDeadline(f"{details.method!r} was called without a deadline; every call needs one")
    metadata = list(details.metadata or ()) + list(trace.outgoing().items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, grpc.aio.Metadata(*metadata), details.credentials, details.wait_for_ready
    )


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_prepared(client_call_details), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_prepared(client_call_details), request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_prepared(client_call_details), request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_prepared(client_call_details), request_iterator)


def _interceptors() -> Iterable[grpc.aio.ClientInterceptor]:
    return [_UnaryUnary(), _UnaryStream(), _StreamUnary(), _StreamStream()]
