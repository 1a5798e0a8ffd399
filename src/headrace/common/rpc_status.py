"""RequestError to rich gRPC status (google.rpc.Status in grpc-status-details-bin) and back.

ErrorInfo is always there; BadRequest and RetryInfo where they belong (AIP-193).
"""

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace.common.errors import (
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
    Unimplemented,
    Violation,
)

ERROR_DOMAIN = "headrace"

_ERROR_OF_CODE: dict[int, type[RequestError]] = {
    error.code.value[0]: error
    for error in (
        AlreadyExists,
        Cancelled,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        InternalError,
        InvalidRequest,
        NotFound,
        Overloaded,
        Unavailable,
        Unimplemented,
    )
}


def to_status(error: RequestError) -> status_pb2.Status:
    """The rich status of an error."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        status.details.add().Pack(bad)
    if isinstance(error, Overloaded | Unavailable):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def trailing_metadata(error: RequestError) -> tuple[tuple[str, str | bytes], ...]:
    """What `context.abort(code, message, trailing_metadata)` takes to carry the details."""
    metadata: tuple[tuple[str, str | bytes], ...] = tuple(rpc_status.to_status(to_status(error)).trailing_metadata)
    if isinstance(error, Overloaded):
        metadata += (("grpc-retry-pushback-ms", str(int(error.retry_delay_s * 1000))),)
    return metadata


def from_code(code: int, message: str, retry_delay_s: float = 1.0) -> RequestError:
    """The error for a google.rpc.Code that travelled inside a message."""
    kind = _ERROR_OF_CODE.get(code, InternalError)
    if kind is InvalidRequest:
        return InvalidRequest([Violation("request", message)])
    if issubclass(kind, Overloaded | Unavailable):
        return kind(message, retry_delay_s=retry_delay_s)
    return kind(message)


def from_rpc_error(error: grpc.aio.AioRpcError) -> RequestError:
    """The error behind a failed call, with its violations and retry delay where the server sent them."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    violations: list[Violation] = []
    retry_delay_s, reason = 1.0, None
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = [Violation(v.field, v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry_delay_s = info.retry_delay.ToNanoseconds() / 1e9
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            error_info = error_details_pb2.ErrorInfo()
            detail.Unpack(error_info)
            reason = error_info.reason
    if violations and error.code() is InvalidRequest.code:
        return InvalidRequest(violations, reason=reason)
    result = from_code(error.code().value[0], error.details() or "", retry_delay_s)
    if reason:
        result.reason = reason
    if violations:
        result.violations = violations
    return result


def code_name(error: RequestError) -> str:
    """Name of the status code, such as INVALID_ARGUMENT."""
    return str(code_pb2.Code.Name(error.code.value[0]))
