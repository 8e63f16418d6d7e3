"""A service with one method of each kind, whose behaviour a test gives: for testing the plumbing alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from services.common.client import Peer
from services.common.server import Server

NAME = "antiphon.test.v1.EchoService"


async def one(request: StringValue, context: Any) -> StringValue:
    return request


async def many(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
    for letter in request.value:
        yield StringValue(value=letter)


async def gather(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
    return StringValue(value="".join([request.value async for request in requests]))


async def chat(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield StringValue(value=request.value.upper())


async def well() -> str | None:
    return None


def echo_server(host: str = "127.0.0.1", port: int = 0, health_check: Any = well, **handlers: Any) -> Server:
    """A server, not yet started; `handlers` (one, many, gather, chat) replace the echoes."""
    server = Server(host, port, health_check)
    make = {
        "One": (grpc.unary_unary_rpc_method_handler, handlers.get("one", one)),
        "Many": (grpc.unary_stream_rpc_method_handler, handlers.get("many", many)),
        "Gather": (grpc.stream_unary_rpc_method_handler, handlers.get("gather", gather)),
        "Chat": (grpc.stream_stream_rpc_method_handler, handlers.get("chat", chat)),
    }
    methods = {
        name: kind(handler, request_deserializer=StringValue.FromString, response_serializer=_serialized)
        for name, (kind, handler) in make.items()
    }

    def register(servicer: Any, grpc_server: grpc.aio.Server) -> None:
        grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, servicer),))

    server.add(register, methods, NAME)
    return server


class EchoStub:
    """The client's side."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        def method(make: Callable[..., Any], name: str) -> Any:
            return make(f"/{NAME}/{name}", request_serializer=_serialized, response_deserializer=StringValue.FromString)

        self.one = method(channel.unary_unary, "One")
        self.many = method(channel.unary_stream, "Many")
        self.gather = method(channel.stream_unary, "Gather")
        self.chat = method(channel.stream_stream, "Chat")


class Echo:
    """A running server, a peer and its stub: `async with Echo(one=...) as echo`."""

    def __init__(self, peer_options: list[tuple[str, int]] | None = None, **server: Any) -> None:
        self.server = echo_server(**server)
        self._peer_options = peer_options

    async def __aenter__(self) -> Echo:
        await self.server.start()
        options = {} if self._peer_options is None else {"options": self._peer_options}
        self.peer = Peer("echo-0", self.server.address, **options)
        self.stub = EchoStub(self.peer.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peer.close()
        await self.server.stop()


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 5.0) -> None:
    """Waits until the condition holds; fails the test when it does not in time."""
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.01)


def _serialized(message: StringValue) -> bytes:
    return message.SerializeToString()
