"""Calls to other services: one channel per peer, a deadline on every call, retries that carry the same request id."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from services.common import trace
from services.common.errors import AntiphonError, Internal, Overloaded, Unavailable
from services.common.status import from_rpc_error

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

# A short keepalive timeout alone has no effect: grpc.http2.ping_timeout_ms rules, and its default is 60 s.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A first connection that is refused must not outlast the few tries of a call: gRPC's own pause is a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]


def new_request_id() -> str:
    """An id for a mutating request; a retry of the request carries the same one."""
    return uuid.uuid4().hex


class Peer:
    """A channel to one worker. `name` is the worker id, for messages."""

    def __init__(self, name: str, address: str, options: Iterable[tuple[str, int]] = CHANNEL_OPTIONS) -> None:
        self.name = name
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=list(options), interceptors=_interceptors())
        self._closed = False

    async def close(self) -> None:
        """Ends the channel; calls under way fail with Unavailable."""
        self._closed = True
        await self.channel.close()

    async def call(self, method: Callable[..., Awaitable[Answer]], request: Any, *, deadline_seconds: float) -> Answer:
        """One unary answer (the request may be an iterator). Raises an error of services/common/errors.py.

        What a request iterator raises is raised here, and the call is cancelled.
        """
        requests = _Requests.of(request)
        try:
            return await method(request if requests is None else requests.iterate(), timeout=deadline_seconds)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error, method, requests) from None
        finally:
            if requests is not None:
                requests.close()

    async def stream(
        self, method: Callable[..., AsyncIterator[Answer]], request: Any, *, deadline_seconds: float
    ) -> AsyncGenerator[Answer, None]:
        """The messages of a streamed answer (the request may be an iterator).

        Leaving an `async for` over it cancels the call, as soon as nobody holds the generator any more; who keeps it
        in a variable closes it (`contextlib.aclosing`). Errors are as in `call`.
        """
        requests = _Requests.of(request)
        call = method(request if requests is None else requests.iterate(), timeout=deadline_seconds)
        try:
            async for answer in call:
                yield answer
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error, method, requests) from None
        finally:
            call.cancel()  # type: ignore[attr-defined]
            if requests is not None:
                requests.close()

    def _translated(
        self, error: grpc.aio.AioRpcError | asyncio.CancelledError, method: Any, requests: _Requests | None
    ) -> BaseException:
        if isinstance(error, asyncio.CancelledError) and _cancel_was_asked():
            return error
        if requests is not None and requests.failure is not None:
            return requests.failure
        where = self._where(method)
        translated: AntiphonError
        if isinstance(error, grpc.aio.AioRpcError):
            translated = from_rpc_error(error, where)
        elif self._closed:
            translated = Unavailable(f"{where}: the channel was closed during the call")
        else:
            translated = Internal(f"{where}: gRPC gave the call up on this side")
        translated.worker_id = self.name
        return translated

    def _where(self, method: Any) -> str:
        name = getattr(method, "_method", b"")
        text = name.decode() if isinstance(name, bytes) else str(name)
        return f"{self.name} ({self.address}) {text.rsplit('/', 1)[-1]}".rstrip()


class _Requests:
    """The caller's request iterator. gRPC consumes it in a task of its own, hides what it raises, and leaves the task
    waiting for the next request when the call has ended: both are mended here.
    """

    def __init__(self, source: AsyncIterable[Any] | Iterable[Any]) -> None:
        self._source = source
        self._consumer: asyncio.Task[Any] | None = None
        self.failure: Exception | None = None

    @classmethod
    def of(cls, request: Any) -> _Requests | None:
        """None when the request is a single message."""
        if not isinstance(request, Message) and isinstance(request, AsyncIterable | Iterable):
            return cls(request)
        _message(request)
        return None

    async def iterate(self) -> AsyncIterator[Any]:
        self._consumer = asyncio.current_task()
        try:
            if isinstance(self._source, AsyncIterable):
                async for request in self._source:
                    yield _message(request)
            else:
                for request in self._source:
                    yield _message(request)
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.cancel()


def _message(request: Any) -> Message:
    """The request itself. What is no message would only be logged by gRPC, and the call would wait for its deadline."""
    if not isinstance(request, Message):
        raise TypeError(f"a request must be a protobuf message, got {type(request).__name__}")
    return request


def _cancel_was_asked() -> bool:
    """Whether somebody cancelled this task. gRPC raises CancelledError for calls that it gave up by itself, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def retried(
    attempt: Callable[[], Awaitable[Answer]],
    *,
    deadline_seconds: float,
    first_pause_seconds: float = 0.1,
    longest_pause_seconds: float = 5.0,
) -> Answer:
    """Repeats `attempt` while it says Unavailable or Overloaded, with growing pauses, until the deadline.

    The attempt must be safe to repeat: it carries one request id, made before. The last error is raised, or where that
    only says that nobody answered, the last that a worker gave: it says why.
    """
    end = time.monotonic() + deadline_seconds
    pause = first_pause_seconds
    told: AntiphonError | None = None
    while True:
        try:
            return await attempt()
        except (Unavailable, Overloaded) as error:
            wait = max(pause * random.uniform(0.5, 1.0), getattr(error, "retry_after_seconds", 0.0))
            told = error if error.answered else told or error
            if time.monotonic() + wait >= end:
                raise told from None
            logger.info("again in %.1f s: %s: %s", wait, type(error).__name__, error)
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


def _interceptors() -> list[grpc.aio.ClientInterceptor]:
    return [_UnaryUnary(), _UnaryStream(), _StreamUnary(), _StreamStream()]
