"""The one table between the errors of the contracts and gRPC status, and the two functions that read it."""

from __future__ import annotations

from typing import TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import (
    AntiphonError,
    Conflict,
    Expired,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)

DOMAIN = "antiphon"
# The status travels twice in the trailing headers (as text and in the details), whose limit is 8 KiB for all of them;
# beyond it the peer gets RESOURCE_EXHAUSTED of its own library instead of our error.
MESSAGE_BYTES = 1500
_DETAILS_KEY = "grpc-status-details-bin"

_TABLE: dict[type[AntiphonError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    Internal: grpc.StatusCode.INTERNAL,
}
# CANCELLED that nobody asked for comes from the transport (a burst on one channel, a peer that went away).
_BACK: dict[grpc.StatusCode, type[AntiphonError]] = {code: error for error, code in _TABLE.items()} | {
    grpc.StatusCode.CANCELLED: Unavailable
}


def code_of(error: AntiphonError) -> grpc.StatusCode:
    """The gRPC code of an error; INTERNAL for one that is not of the contracts."""
    return next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), grpc.StatusCode.INTERNAL)


Detail: TypeAlias = error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo


def to_status(error: AntiphonError) -> grpc.Status:
    """The gRPC status of an error, with ErrorInfo (its stable code) and, when overloaded, RetryInfo."""
    details: list[any_pb2.Any] = []
    for message in _details(error):
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=code_of(error).value[0], message=_shortened(str(error)), details=details)
    )
    return status


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> AntiphonError:
    """The error a failed call stands for. `peer` names the worker and the method in the message."""
    details = _details_of(error)
    translated = _translated(error, peer, details)
    translated.answered = any(isinstance(detail, error_details_pb2.ErrorInfo) for detail in details)
    return translated


def _translated(error: grpc.aio.AioRpcError, peer: str, details: list[Detail]) -> AntiphonError:
    cls = _BACK.get(error.code(), Internal)
    message = f"{peer}: {error.details() or error.code().name}"
    if error.code() not in _BACK:
        message = f"{peer}: {error.code().name}: {error.details()}"
    if cls is not Overloaded:
        return cls(message)
    if not any(isinstance(detail, error_details_pb2.ErrorInfo) for detail in details):
        # Not said by a service but by the gRPC library: a message or its headers are too large. Again, it would be so.
        return InvalidRequest(message)
    for detail in details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            return Overloaded(message, detail.retry_delay.ToNanoseconds() / 1e9)
    return Overloaded(message)


def _details(error: AntiphonError) -> list[Detail]:
    details: list[Detail] = [error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)]
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _details_of(error: grpc.aio.AioRpcError) -> list[Detail]:
    details: list[Detail] = []
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            packed = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue
        for any_message in packed:
            for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
                if any_message.Is(kind.DESCRIPTOR):
                    detail = kind()
                    any_message.Unpack(detail)
                    details.append(detail)
    return details


def _shortened(message: str) -> str:
    data = message.encode()
    if len(data) <= MESSAGE_BYTES:
        return message
    kept = data[:MESSAGE_BYTES].decode(errors="ignore")
    return f"{kept} … (cut: {len(data)} bytes in all; the rest is in the service's log)"
