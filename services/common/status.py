"""The one table between the errors of the contracts and gRPC status, and the two functions that read it."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
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


def to_status(error: AntiphonError) -> grpc.Status:
    """The gRPC status of an error, with ErrorInfo (its stable code) and, when overloaded, RetryInfo."""
    code = next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), grpc.StatusCode.INTERNAL)
    details: list[any_pb2.Any] = []
    for message in _details(error):
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=str(error), details=details))


def _details(error: AntiphonError) -> list[error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo]:
    details: list[error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo] = [
        error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    ]
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


async def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> AntiphonError:
    """The error a failed call stands for. `peer` names the worker and the method in the message."""
    cls = _BACK.get(error.code(), Internal)
    message = f"{peer}: {error.details() or error.code().name}"
    if cls is Overloaded:
        status = await rpc_status.aio.from_call(error)  # type: ignore[arg-type]
        for detail in status.details if status else ():
            if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                info = error_details_pb2.RetryInfo()
                detail.Unpack(info)
                return Overloaded(message, info.retry_delay.ToNanoseconds() / 1e9)
    return cls(message)
