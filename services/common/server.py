"""A service's gRPC server: errors translated, trace adopted, honest health, reflection on loopback, drain on a signal.

What a handler has to know of the library (seen with grpcio 1.85):
- A call that its client cancelled or whose deadline passed ends its handler with CancelledError at the next await: work
  that must not be cut in two belongs into services/common/operations.py.
- **A request stream that the client cancelled ends like one that it finished**, a moment before the CancelledError. A
  handler must know from the content (a count, a digest) that a stream is whole before it acts on it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import trace
from services.common.errors import AntiphonError, Internal, InvalidRequest
from services.common.status import code_of, to_status

logger = logging.getLogger(__name__)

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Without it the pings of an idle client are answered by GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
]
HEALTH_PERIOD_SECONDS = 1.0
# A check that does not answer is an answer: the service is stuck.
HEALTH_CHECK_SECONDS = 5.0

HealthCheck = Callable[[], Awaitable[str | None]]
"""Answers None when the service and the children it depends on work, else what is wrong."""


class Server:
    """One server of one process. Add servicers, `start`, then `serve_until_stopped` (or `stop`, in a test)."""

    def __init__(self, host: str, port: int, health_check: HealthCheck) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._loopback = host in ("127.0.0.1", "localhost", "::1")
        self._wanted_port = port
        self._health_check = health_check
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[_Interceptor()])
        self._health = health.aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None
        self._names: list[str] = []
        self._stop = asyncio.Event()
        self._signalled = False
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: Any, full_name: str) -> None:
        """Adds a servicer: `add(add_XServicer_to_server, servicer, DESCRIPTOR.services_by_name["X"].full_name)`."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> None:
        """Binds and serves. Raises OSError naming the address when the port is taken."""
        await self._set_health(False)  # until the first check
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._loopback:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{self._wanted_port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._host}:{self._wanted_port}: {error}") from None
        await self._server.start()
        self._health_task = asyncio.create_task(self._watch_health(), name="health")
        logger.info("serving on %s: %s", self.address, ", ".join(self._names))

    def request_stop(self) -> None:
        """Makes `serve_until_stopped` drain and return."""
        self._stop.set()

    def handle_signals(self) -> None:
        """From now on SIGTERM and SIGINT ask for a stop, and a second one ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled:
            logger.warning("second signal (%s): ending at once", number.name)
            os._exit(128 + number)
        self._signalled = True  # a stop that was under way already goes on in order
        logger.info("%s: stopping", number.name)
        self._stop.set()

    async def serve_until_stopped(
        self, on_drain: Callable[[], Awaitable[None]] | None = None, grace_seconds: float = 10.0
    ) -> None:
        """Serves until SIGTERM, SIGINT or `request_stop`; then: not serving, `on_drain`, calls end within the grace.

        A health check that raises stops the server as well, and its exception is raised after the drain.
        """
        self.handle_signals()
        health_task = self._health_task
        if health_task is None:
            raise RuntimeError("serve_until_stopped before start")
        health_task.add_done_callback(lambda _: self._stop.set())
        await self._stop.wait()
        try:
            await self._health.enter_graceful_shutdown()
            if on_drain is not None:
                await on_drain()
        finally:
            await self.stop(grace_seconds)
            logger.info("stopped")
        if not health_task.cancelled() and (error := health_task.exception()) is not None:
            raise error

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuses new calls, lets those under way end within the grace, cancels the rest."""
        if self._health_task is not None:
            self._health_task.cancel()
        await self._server.stop(grace_seconds)

    async def _watch_health(self) -> None:
        previous: tuple[str | None] | None = None
        try:
            while True:
                problem = await self._checked()
                if previous is None or problem != previous[0]:
                    await self._set_health(problem is None)
                    if problem is not None:
                        logger.warning("not serving: %s", problem)
                    elif previous is not None:
                        logger.info("serving again")
                    previous = (problem,)
                await asyncio.sleep(HEALTH_PERIOD_SECONDS)
        except Exception:
            logger.exception("the health check is broken")
            await self._set_health(False)
            raise

    async def _checked(self) -> str | None:
        try:
            async with asyncio.timeout(HEALTH_CHECK_SECONDS):
                return await self._health_check()
        except TimeoutError:
            return f"the health check did not answer within {HEALTH_CHECK_SECONDS:.0f} s"

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ["", *self._names]:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


class _Interceptor(grpc.aio.ServerInterceptor):
    """Around every handler: the caller's trace, and the translation of errors."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        handle, make = {
            (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        }[handler.request_streaming, handler.response_streaming]
        # A streaming handler yields its answers or writes them (health's Watch); the library tells them apart so, too.
        wrapped = _generating(handle, method) if inspect.isasyncgenfunction(handle) else _single(handle, method)
        parse = handler.request_deserializer
        return make(wrapped, None if parse is None else _parsing(parse), handler.response_serializer)


class _Unreadable:
    """A request whose bytes are not the message; the library by itself would answer UNKNOWN."""


def _parsing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Unreadable()

    return parsed


def _readable(request: Any, method: str) -> Any:
    """The request, or the stream of them. Raises InvalidRequest for unreadable bytes (a stream: when it meets them)."""
    if isinstance(request, _Unreadable):
        raise InvalidRequest(f"{method}: the bytes of the request are not the message that the contract has")
    return _readable_stream(request, method) if isinstance(request, AsyncIterable) else request


async def _readable_stream(requests: AsyncIterable[Any], method: str) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request, method)


def _single(handle: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        trace.adopt(_headers(context))
        try:
            return await handle(_readable(request, method), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await context.abort_with_status(_status(error, method))

    return wrapped


def _generating(handle: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        trace.adopt(_headers(context))
        try:
            # Closed with the call, not when collected.
            async with aclosing(handle(_readable(request, method), context)) as answers:
                async for answer in answers:
                    yield answer
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await context.abort_with_status(_status(error, method))

    return wrapped


def _headers(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _status(error: Exception, method: str) -> grpc.Status:
    if not isinstance(error, AntiphonError):
        logger.error("%s: a bug", method, exc_info=error)
        return to_status(Internal(f"{type(error).__name__} in {method}; the traceback is in the service's log"))
    if code_of(error) is grpc.StatusCode.INTERNAL:
        logger.error("%s: %s: %s", method, error.code, error, exc_info=error)
    else:
        logger.info("%s: %s: %s", method, error.code, error)
    return to_status(error)
