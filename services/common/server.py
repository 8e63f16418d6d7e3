"""A service's gRPC server: error translation, trace context, honest health, reflection on loopback, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import trace
from services.common.errors import AntiphonError, Internal
from services.common.status import to_status

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

HealthCheck = Callable[[], Awaitable[str | None]]
"""Answers None when the service and the children it depends on work, else what is wrong."""


class Server:
    """One server of one process. Add servicers, `start`, then `serve_until_stopped`."""

    def __init__(self, host: str, port: int, health_check: HealthCheck) -> None:
        self._host = host
        self._wanted_port = port
        self._health_check = health_check
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[_Interceptor()])
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        self._stop = asyncio.Event()
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
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._host in ("127.0.0.1", "localhost", "::1"):
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{self._wanted_port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._host}:{self._wanted_port}: {error}") from None
        await self._server.start()
        logger.info("serving on %s: %s", self.address, ", ".join(self._names))

    def request_stop(self) -> None:
        """Makes `serve_until_stopped` drain and return."""
        self._stop.set()

    async def serve_until_stopped(
        self, on_drain: Callable[[], Awaitable[None]] | None = None, grace_seconds: float = 10.0
    ) -> None:
        """Serves until SIGTERM, SIGINT or `request_stop`; then: not serving, `on_drain`, calls end within the grace."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        watcher = asyncio.create_task(self._watch_health())
        watcher.add_done_callback(lambda _: self._stop.set())
        await self._stop.wait()
        watcher.cancel()
        await self._health.enter_graceful_shutdown()
        if on_drain is not None:
            await on_drain()
        await self._server.stop(grace_seconds)
        logger.info("stopped")

    async def _watch_health(self) -> None:
        previous: str | None = "starting"
        while True:
            problem = await self._health_check()
            if problem != previous:
                serving = health_pb2.HealthCheckResponse.SERVING if problem is None else health_pb2.HealthCheckResponse.NOT_SERVING
                for name in ["", *self._names]:
                    await self._health.set(name, serving)
                if problem is not None:
                    logger.warning("not serving: %s", problem)
                previous = problem
            await asyncio.sleep(HEALTH_PERIOD_SECONDS)


class _Interceptor(grpc.aio.ServerInterceptor):
    """Around every handler: the caller's trace, and the translation of errors."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            wrapped = _streaming(handler.unary_stream or handler.stream_stream, method)
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        else:
            wrapped = _single(handler.unary_unary or handler.stream_unary, method)
            make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _single(handle: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with trace.incoming(_headers(context)):
            try:
                return await handle(request, context)
            except Exception as error:
                await context.abort_with_status(_status(error, method))

    return wrapped


def _streaming(handle: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with trace.incoming(_headers(context)):
            try:
                async for answer in handle(request, context):
                    yield answer
            except Exception as error:
                await context.abort_with_status(_status(error, method))

    return wrapped


def _headers(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _status(error: Exception, method: str) -> grpc.Status:
    if isinstance(error, AntiphonError):
        logger.info("%s: %s: %s", method, error.code, error)
        return to_status(error)
    if isinstance(error, grpc.aio.AbortError):
        raise error
    logger.error("%s: a bug", method, exc_info=error)
    return to_status(Internal(f"{type(error).__name__} in {method}; the traceback is in the service's log"))
