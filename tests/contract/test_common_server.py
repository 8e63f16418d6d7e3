"""Server and client of services/common against each other over real channels."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common import trace
from services.common.client import CHANNEL_OPTIONS, MissingDeadline, Peer, retried
from services.common.errors import (
    AntiphonError,
    ConfigError,
    Conflict,
    Expired,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from tests.contract.echo_service import NAME, Echo, EchoStub, echo_server, until


def text(value: str) -> StringValue:
    return StringValue(value=value)


async def texts(*values: str) -> AsyncIterator[StringValue]:
    for value in values:
        yield text(value)


def raising(error: BaseException) -> Any:
    async def one(request: StringValue, context: Any) -> StringValue:
        raise error

    return one


# Calls


async def test_every_kind_of_call_answers() -> None:
    async with Echo() as echo:
        assert (await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)).value == "a"
        many = echo.peer.stream(echo.stub.many, text("abc"), deadline_seconds=5)
        assert [answer.value async for answer in many] == ["a", "b", "c"]
        assert (await echo.peer.call(echo.stub.gather, texts("x", "y"), deadline_seconds=5)).value == "xy"
        assert (await echo.peer.call(echo.stub.gather, [text("p"), text("q")], deadline_seconds=5)).value == "pq"
        chat = echo.peer.stream(echo.stub.chat, texts("x", "y"), deadline_seconds=5)
        assert [answer.value async for answer in chat] == ["X", "Y"]


async def test_a_call_without_a_deadline_is_refused() -> None:
    async with Echo() as echo:
        with pytest.raises(MissingDeadline):
            await echo.stub.one(text("a"))
        with pytest.raises(MissingDeadline):
            await echo.stub.gather(texts("a"))
        with pytest.raises(MissingDeadline):
            _ = [answer async for answer in echo.stub.many(text("a"))]
        with pytest.raises(MissingDeadline):
            _ = [answer async for answer in echo.stub.chat(texts("a"))]


async def test_the_deadline_ends_a_call_on_both_sides() -> None:
    ended = asyncio.Event()

    async def one(request: StringValue, context: Any) -> StringValue:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return request

    async with Echo(one=one) as echo:
        began = time.monotonic()
        with pytest.raises(Expired, match=r"echo-0 .* One"):
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=0.2)
        assert time.monotonic() - began < 3
        await asyncio.wait_for(ended.wait(), 5)


async def test_five_hundred_calls_at_once() -> None:
    async with Echo() as echo:
        answers = await asyncio.gather(
            *(echo.peer.call(echo.stub.one, text(str(number)), deadline_seconds=30) for number in range(500))
        )
    assert [int(answer.value) for answer in answers] == list(range(500))


async def test_the_trace_of_the_caller_is_the_one_of_the_handler() -> None:
    async def one(request: StringValue, context: Any) -> StringValue:
        await asyncio.sleep(0)
        return text(trace.trace_id())

    async def chat(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for _ in requests:
            yield text(trace.trace_id())

    async with Echo(one=one, chat=chat) as echo:
        with trace.root():
            expected = trace.trace_id()
            assert (await echo.peer.call(echo.stub.one, text(""), deadline_seconds=5)).value == expected
            seen = [a.value async for a in echo.peer.stream(echo.stub.chat, texts("", ""), deadline_seconds=5)]
        assert seen == [expected, expected]
        # Without one, each call makes its own, and none stays behind in this task.
        alone = {(await echo.peer.call(echo.stub.one, text(""), deadline_seconds=5)).value for _ in range(2)}
        assert len(alone) == 2 and expected not in alone and "" not in alone
        assert trace.trace_id() == ""


# Errors


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (InvalidRequest("m"), grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (NotFound("m"), grpc.StatusCode.NOT_FOUND, NotFound),
        (Conflict("m"), grpc.StatusCode.FAILED_PRECONDITION, Conflict),
        (Overloaded("m", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (Unavailable("m"), grpc.StatusCode.UNAVAILABLE, Unavailable),
        (Expired("m"), grpc.StatusCode.DEADLINE_EXCEEDED, Expired),
        (Internal("m"), grpc.StatusCode.INTERNAL, Internal),
        (ConfigError("m"), grpc.StatusCode.INTERNAL, Internal),
    ],
)
async def test_an_error_keeps_its_class_and_message_over_the_wire(
    raised: AntiphonError, code: grpc.StatusCode, expected: type[AntiphonError]
) -> None:
    class Narrower(type(raised)):  # type: ignore[misc]
        """A subclass travels as its parent."""

    for error in (raised, Narrower(*raised.args)):
        error.args = ("grün: 3 != 4",)
        async with Echo(one=raising(error)) as echo:
            with pytest.raises(grpc.aio.AioRpcError) as raw:
                await echo.stub.one(text("a"), timeout=5)
            assert raw.value.code() is code
            with pytest.raises(AntiphonError) as caught:
                await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)
        assert type(caught.value) is expected
        assert str(caught.value) == f"echo-0 ({echo.server.address}) One: grün: 3 != 4"
        assert caught.value.worker_id == "echo-0"
    if isinstance(raised, Overloaded):
        async with Echo(one=raising(raised)) as echo:
            with pytest.raises(Overloaded) as overloaded:
                await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)
        assert overloaded.value.retry_after_seconds == 2.5


async def test_a_bug_is_internal_and_only_the_log_has_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def many(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield text("first")
        raise KeyError("secret-in-stream")

    async with Echo(one=raising(ZeroDivisionError("secret-in-unary")), many=many) as echo:
        with caplog.at_level(logging.ERROR), pytest.raises(Internal) as unary:
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)
        assert "ZeroDivisionError" in str(unary.value) and "secret" not in str(unary.value)
        received = []
        with caplog.at_level(logging.ERROR), pytest.raises(Internal, match="KeyError") as streamed:
            async for answer in echo.peer.stream(echo.stub.many, text("a"), deadline_seconds=5):
                received.append(answer.value)
        assert received == ["first"] and "secret" not in str(streamed.value)
    for secret in ("secret-in-unary", "secret-in-stream"):
        assert sum(secret in (record.exc_text or "") + record.getMessage() for record in caplog.records) == 1


async def test_an_error_in_the_middle_of_a_stream_keeps_its_class() -> None:
    async def chat(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            if request.value == "bad":
                raise Conflict("the second is bad")
            yield request

    async with Echo(chat=chat) as echo:
        received = []
        with pytest.raises(Conflict, match="the second is bad"):
            async for answer in echo.peer.stream(echo.stub.chat, texts("ok", "bad"), deadline_seconds=5):
                received.append(answer.value)
        assert received == ["ok"]


async def test_a_message_too_long_for_the_headers_is_cut() -> None:
    async with Echo(one=raising(NotFound("ä" * 20_000))) as echo:
        with pytest.raises(NotFound, match=r"ä{700,800} … \(cut: 40000 bytes"):
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)


async def test_a_message_beyond_the_size_limit_is_not_retried_as_overload() -> None:
    async def one(request: StringValue, context: Any) -> StringValue:
        return text("x" * 5_000_000)

    async with Echo(one=one) as echo:
        with pytest.raises(InvalidRequest, match="larger than max"):
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)
        with pytest.raises(InvalidRequest, match="larger than max"):
            await echo.peer.call(echo.stub.one, text("x" * 5_000_000), deadline_seconds=5)


async def test_a_handler_may_abort_by_itself() -> None:
    async def one(request: StringValue, context: Any) -> StringValue:
        await context.abort(grpc.StatusCode.NOT_FOUND, "by hand")
        raise AssertionError

    async with Echo(one=one) as echo:
        with pytest.raises(NotFound, match="by hand"):
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)


async def test_cancelled_by_nobody_here_is_unavailable() -> None:
    async def one(request: StringValue, context: Any) -> StringValue:
        await context.abort(grpc.StatusCode.CANCELLED, "went away")
        raise AssertionError

    async def many(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield request
        await asyncio.sleep(30)

    async with Echo(one=one, many=many) as echo:
        with pytest.raises(Unavailable, match="went away"):
            await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)
        stream = echo.peer.stream(echo.stub.many, text("a"), deadline_seconds=5)
        assert (await anext(stream)).value == "a"
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await echo.peer.close()
        with pytest.raises(Unavailable, match="channel was closed"):
            await asyncio.wait_for(waiting, 5)


async def test_a_cancelled_caller_is_cancelled_and_so_is_the_handler() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def one(request: StringValue, context: Any) -> StringValue:
        began.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return request

    async with Echo(one=one) as echo:
        caller = asyncio.create_task(echo.peer.call(echo.stub.one, text("a"), deadline_seconds=20))
        await asyncio.wait_for(began.wait(), 5)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.wait_for(ended.wait(), 5)


async def test_nobody_listening_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        peer = Peer("gone-0", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Unavailable, match="gone-0"):
            await peer.call(EchoStub(peer.channel).one, text("a"), deadline_seconds=10)
        await peer.close()


# Streams


async def test_leaving_a_stream_early_cancels_it_and_closes_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    closed = asyncio.Event()
    yielded = 0

    async def many(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        nonlocal yielded
        try:
            while True:
                yielded += 1
                yield request
                await asyncio.sleep(0)
        finally:
            closed.set()

    async with Echo(many=many) as echo:
        async for _ in echo.peer.stream(echo.stub.many, text("a"), deadline_seconds=20):
            break
        await asyncio.wait_for(closed.wait(), 5)

        closed.clear()
        stream = echo.peer.stream(echo.stub.many, text("a"), deadline_seconds=20)
        async with aclosing(stream):
            assert (await anext(stream)).value == "a"
        await asyncio.wait_for(closed.wait(), 5)

        closed.clear()
        with caplog.at_level(logging.ERROR):
            consumer = asyncio.create_task(_drain(echo.peer.stream(echo.stub.many, text("a"), deadline_seconds=20)))
            started = yielded
            await until(lambda: yielded > started + 2)
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            await asyncio.wait_for(closed.wait(), 5)
            gc.collect()
            await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


async def _drain(stream: AsyncIterator[StringValue]) -> None:
    async for _ in stream:
        pass


async def test_what_a_request_iterator_raises_is_raised_by_the_call() -> None:
    cancelled = asyncio.Event()

    async def gather(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        try:
            _ = [request async for request in requests]  # ends as if the stream were whole
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return text("")

    async def broken() -> AsyncIterator[StringValue]:
        yield text("a")
        raise LookupError("row 7 is gone")

    async with Echo(gather=gather) as echo:
        with pytest.raises(LookupError, match="row 7"):
            await echo.peer.call(echo.stub.gather, broken(), deadline_seconds=10)
        await asyncio.wait_for(cancelled.wait(), 5)
        with pytest.raises(LookupError, match="row 7"):
            await _drain(echo.peer.stream(echo.stub.chat, broken(), deadline_seconds=10))
        with pytest.raises(TypeError, match="got int"):
            await echo.peer.call(echo.stub.gather, [7], deadline_seconds=10)
        with pytest.raises(TypeError, match="got int"):
            await echo.peer.call(echo.stub.one, 7, deadline_seconds=10)


async def test_a_request_iterator_does_not_outlive_its_call() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[StringValue]:
        try:
            yield text("bad")
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def chat(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            raise InvalidRequest(request.value)
        yield text("")

    async with Echo(chat=chat) as echo:
        with pytest.raises(InvalidRequest):
            await _drain(echo.peer.stream(echo.stub.chat, endless(), deadline_seconds=10))
        await asyncio.wait_for(closed.wait(), 5)


# Retries


async def test_retrying_goes_on_for_what_may_pass_and_honours_retry_after() -> None:
    pending: list[BaseException] = [Unavailable("starting"), Overloaded("full", 0.4), Unavailable("starting")]
    seen: list[tuple[float, str]] = []

    async def one(request: StringValue, context: Any) -> StringValue:
        seen.append((time.monotonic(), request.value))
        if pending:
            raise pending.pop(0)
        return text("done")

    async with Echo(one=one) as echo:
        request = text("the same id")
        answer = await retried(
            lambda: echo.peer.call(echo.stub.one, request, deadline_seconds=5),
            deadline_seconds=10,
            first_pause_seconds=0.01,
        )
    assert answer.value == "done"
    assert [value for _, value in seen] == ["the same id"] * 4
    assert seen[2][0] - seen[1][0] >= 0.4


@pytest.mark.parametrize("error", [Conflict("m"), InvalidRequest("m"), NotFound("m"), Expired("m"), Internal("m")])
async def test_what_cannot_pass_is_not_retried(error: AntiphonError) -> None:
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        raise error

    with pytest.raises(type(error)):
        await retried(attempt, deadline_seconds=5)
    assert attempts == 1


async def test_retrying_ends_at_the_deadline_with_the_last_error() -> None:
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        raise Unavailable(f"attempt {attempts}")

    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await retried(attempt, deadline_seconds=0.5, first_pause_seconds=0.05)
    assert time.monotonic() - began < 4
    assert 2 <= attempts <= 20 and str(caught.value) == f"attempt {attempts}"

    async def far() -> None:
        raise Overloaded("full", 60.0)

    began = time.monotonic()
    with pytest.raises(Overloaded):
        await retried(far, deadline_seconds=5)
    assert time.monotonic() - began < 4  # it does not wait for what would come too late


# Health, reflection, ports


async def health_of(peer: Peer, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(peer.channel)
    answer = await peer.call(stub.Check, health_pb2.HealthCheckRequest(service=service), deadline_seconds=5)
    return int(answer.status)


async def healthy(peer: Peer, expected: int) -> None:
    """Waits until the health of the server and of its service is as expected."""

    async def seen() -> bool:
        return {await health_of(peer), await health_of(peer, NAME)} == {expected}

    await until(seen)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_says_what_the_check_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.server.HEALTH_PERIOD_SECONDS", 0.02)
    monkeypatch.setattr("services.common.server.HEALTH_CHECK_SECONDS", 0.1)
    problem: str | None = "the engine is dead"
    hang = gate = asyncio.Event()

    async def check() -> str | None:
        await gate.wait()
        return problem

    async with Echo(health_check=check) as echo:
        assert await health_of(echo.peer) == NOT_SERVING  # not before the first check
        gate = asyncio.Event()
        gate.set()
        await healthy(echo.peer, NOT_SERVING)
        problem = None
        await healthy(echo.peer, SERVING)
        watch = health_pb2_grpc.HealthStub(echo.peer.channel).Watch
        async with aclosing(echo.peer.stream(watch, health_pb2.HealthCheckRequest(), deadline_seconds=10)) as statuses:
            assert (await anext(statuses)).status == SERVING
            problem = "rank 1 is dead"
            assert (await anext(statuses)).status == NOT_SERVING
        problem = None
        await healthy(echo.peer, SERVING)
        gate = hang = asyncio.Event()  # a check that hangs is an answer
        await healthy(echo.peer, NOT_SERVING)
        hang.set()
        await healthy(echo.peer, SERVING)


async def test_a_broken_health_check_stops_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> str | None:
        raise LookupError("no such child")

    server = echo_server(health_check=check)
    await server.start()
    with pytest.raises(LookupError, match="no such child"):
        await asyncio.wait_for(server.serve_until_stopped(grace_seconds=0), 5)
    assert "the health check is broken" in caplog.text


async def test_draining_is_not_serving_then_ends_calls_within_the_grace() -> None:
    draining, release = asyncio.Event(), asyncio.Event()

    async def on_drain() -> None:
        draining.set()
        await release.wait()

    async def one(request: StringValue, context: Any) -> StringValue:
        await asyncio.sleep(0.2 if request.value == "short" else 30)
        return request

    async with Echo(one=one) as echo:
        serving = asyncio.create_task(echo.server.serve_until_stopped(on_drain, grace_seconds=1.0))
        await healthy(echo.peer, SERVING)
        short = asyncio.create_task(echo.peer.call(echo.stub.one, text("short"), deadline_seconds=20))
        long = asyncio.create_task(echo.peer.call(echo.stub.one, text("long"), deadline_seconds=20))
        echo.server.request_stop()
        await asyncio.wait_for(draining.wait(), 5)
        assert await health_of(echo.peer) == NOT_SERVING
        release.set()
        assert (await short).value == "short"
        with pytest.raises(Unavailable):
            await long
        await asyncio.wait_for(serving, 5)


async def test_reflection_lists_the_services_on_loopback_only() -> None:
    async def listed(peer: Peer) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        answers = peer.stream(stub.ServerReflectionInfo, ask, deadline_seconds=5)
        return {s.name async for answer in answers for s in answer.list_services_response.service}

    async with Echo() as echo:
        assert await listed(echo.peer) >= {NAME, "grpc.health.v1.Health"}
    server = echo_server(host="0.0.0.0")
    await server.start()
    peer = Peer("echo-0", f"127.0.0.1:{server.port}")
    try:
        assert (await peer.call(EchoStub(peer.channel).one, text("a"), deadline_seconds=5)).value == "a"
        with pytest.raises(Internal, match="UNIMPLEMENTED"):
            await listed(peer)
    finally:
        await peer.close()
        await server.stop()


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    async with Echo() as echo:
        second = echo_server(port=echo.server.port)
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{echo.server.port}"):
            await second.start()


async def test_an_ipv6_address_can_be_called() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return  # this machine has no IPv6: nothing to test
    async with Echo(host="::1") as echo:
        assert echo.server.address == f"[::1]:{echo.server.port}"
        assert (await echo.peer.call(echo.stub.one, text("a"), deadline_seconds=5)).value == "a"


# Processes


SERVER = """
    import asyncio, sys
    from services.common.processes import die_with_parent
    from tests.contract.echo_service import echo_server

    die_with_parent(int(sys.argv[1]))

    async def one(request, context):
        if request.value == "stop":
            server.request_stop()
        else:
            await asyncio.sleep(float(request.value))
        return request

    async def many(request, context):
        yield request
        await asyncio.sleep(float(request.value))

    async def drain():
        print("draining", flush=True)

    async def main():
        global server
        server = echo_server(one=one, many=many)
        await server.start()
        print(server.address, flush=True)
        await server.serve_until_stopped(drain, grace_seconds=5)
        print("ended", flush=True)

    asyncio.run(main())
"""


@pytest.fixture
def server_process() -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    yield process
    process.kill()
    process.wait(10)


def address_of(process: Any) -> str:
    return str(process.stdout.readline().strip())


async def test_sigterm_drains_and_ends_with_zero(server_process: Any) -> None:
    peer = Peer("child-0", address_of(server_process))
    stub = EchoStub(peer.channel)
    await peer.call(stub.one, text("0"), deadline_seconds=10)
    under_way = asyncio.create_task(peer.call(stub.one, text("0.5"), deadline_seconds=10))
    await asyncio.sleep(0.2)
    server_process.send_signal(signal.SIGTERM)
    assert (await under_way).value == "0.5"
    assert await asyncio.to_thread(server_process.wait, 10) == 0
    assert server_process.stdout.read().split() == ["draining", "ended"]
    await peer.close()


async def test_a_second_sigterm_ends_at_once(server_process: Any) -> None:
    peer = Peer("child-0", address_of(server_process))
    stub = EchoStub(peer.channel)
    under_way = asyncio.create_task(peer.call(stub.one, text("30"), deadline_seconds=60))
    await asyncio.sleep(0.2)
    server_process.send_signal(signal.SIGTERM)
    assert server_process.stdout.readline() == "draining\n"
    server_process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(server_process.wait, 3) == 128 + signal.SIGTERM
    with pytest.raises(Unavailable):
        await under_way
    await peer.close()


async def test_a_first_sigterm_into_a_stop_under_way_leaves_it_in_order(server_process: Any) -> None:
    peer = Peer("child-0", address_of(server_process))
    stub = EchoStub(peer.channel)
    under_way = asyncio.create_task(peer.call(stub.one, text("1"), deadline_seconds=10))
    await asyncio.sleep(0.2)
    await peer.call(stub.one, text("stop"), deadline_seconds=10)
    assert server_process.stdout.readline() == "draining\n"
    server_process.send_signal(signal.SIGTERM)
    assert (await under_way).value == "1"
    assert await asyncio.to_thread(server_process.wait, 10) == 0
    await peer.close()


async def test_a_killed_peer_is_unavailable_for_calls_and_streams(server_process: Any) -> None:
    peer = Peer("child-0", address_of(server_process))
    stub = EchoStub(peer.channel)
    stream = peer.stream(stub.many, text("30"), deadline_seconds=60)
    await anext(stream)
    under_way = asyncio.create_task(peer.call(stub.one, text("30"), deadline_seconds=60))
    await asyncio.sleep(0.2)
    server_process.kill()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(under_way, 5)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(anext(stream), 5)
    await peer.close()


async def frozen_is_noticed_after(process: Any, options: list[tuple[str, int]]) -> float:
    peer = Peer("child-0", address_of(process), options)
    stub = EchoStub(peer.channel)
    await peer.call(stub.one, text("0"), deadline_seconds=10)
    under_way = asyncio.create_task(peer.call(stub.one, text("100"), deadline_seconds=120))
    await asyncio.sleep(0.2)
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(under_way, 60)
        return time.monotonic() - began
    finally:
        os.kill(process.pid, signal.SIGCONT)
        await peer.close()


async def test_a_frozen_peer_is_noticed_by_keepalive(server_process: Any) -> None:
    """The same options as in production at a fifth of the times; without any one of the three it takes far longer."""
    scaled = [(name, value // 5 if name.endswith("_ms") else value) for name, value in CHANNEL_OPTIONS]
    assert 0.9 < await frozen_is_noticed_after(server_process, scaled) < 5


@pytest.mark.slow
async def test_a_frozen_peer_is_noticed_within_fifteen_seconds(server_process: Any) -> None:
    assert await frozen_is_noticed_after(server_process, CHANNEL_OPTIONS) < 17


@pytest.mark.slow
async def test_an_idle_peer_is_not_punished_for_its_pings(server_process: Any) -> None:
    """A server that dislikes pings closes the connection with too_many_pings: a stream would break."""
    peer = Peer("child-0", address_of(server_process))
    stub = EchoStub(peer.channel)
    answers = [a.value async for a in peer.stream(stub.many, text("45"), deadline_seconds=60)]
    assert answers == ["45"]
    await peer.close()
