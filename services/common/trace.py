"""W3C trace context, carried on every call. Without an OpenTelemetry SDK the ids still link the services' logs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def outgoing() -> dict[str, str]:
    """Headers for a call: the current trace, or a new one where there is none."""
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        _propagator.inject(headers)
    else:
        _propagator.inject(headers, trace.set_span_in_context(_new_span()))
    return headers


def adopt(headers: Mapping[str, str]) -> None:
    """Makes the caller's trace the current one for the rest of this task (a gRPC call is handled in a task of its own).

    Nothing is put back: a stream's handler may be closed from another task, where putting back is an error.
    """
    context.attach(_propagator.extract(headers))


@contextmanager
def incoming(headers: Mapping[str, str]) -> Iterator[None]:
    """Makes the caller's trace the current one for a block that begins and ends in one task."""
    token = context.attach(_propagator.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def root() -> Iterator[None]:
    """Starts a trace of its own, e.g. for one Step; calls made inside carry it."""
    token = context.attach(trace.set_span_in_context(_new_span()))
    try:
        yield
    finally:
        context.detach(token)


def trace_id() -> str:
    """The current trace id in hex; empty where there is none."""
    span = trace.get_current_span().get_span_context()
    return format(span.trace_id, "032x") if span.is_valid else ""


def _new_span() -> trace.NonRecordingSpan:
    return trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=secrets.randbits(128) or 1,
            span_id=secrets.randbits(64) or 1,
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
    )
