"""RequestError to rich gRPC status (google.rpc.Status in grpc-status-details-bin) and back.

ErrorInfo is always there; BadRequest and RetryInfo where they belong (AIP-193). A status travels in HTTP/2 headers, of
which a client takes 8 KiB: what is longer would reach it as another error, so long messages and lists are cut.
"""

from collections.abc import Callable, Iterable

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
# Together with names and framing they stay below 8 KiB of headers, whatever the characters are.
MAX_MESSAGE_HEADER_BYTES = 3500
MAX_VIOLATION_BYTES = 3000
MAX_VIOLATION_FIELD_BYTES = 256

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


def status_message(error: RequestError) -> str:
    """The error's message, cut where it is too long for a header."""
    return _cut(error.message, MAX_MESSAGE_HEADER_BYTES, _message_header_bytes)


def to_status(error: RequestError) -> status_pb2.Status:
    """The rich status of an error, cut to what a header takes: the first violations, the beginnings of long texts."""
    status = status_pb2.Status(code=error.code.value[0], message=status_message(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in _first_violations(error.violations):
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


def _first_violations(violations: Iterable[Violation]) -> Iterable[Violation]:
    left = MAX_VIOLATION_BYTES
    for violation in violations:
        field = _cut(violation.field, MAX_VIOLATION_FIELD_BYTES, _utf8_bytes)
        left -= _utf8_bytes(field)
        if left <= 0:
            return
        description = _cut(violation.description, left, _utf8_bytes)
        left -= _utf8_bytes(description) + 8  # protobuf's tags and lengths
        yield Violation(field, description)


def _cut(text: str, max_bytes: int, size: Callable[[str], float]) -> str:
    """As much of the text's beginning as fits; looks at no more of it than that."""
    left: float = max_bytes - size("…")
    for position, character in enumerate(text):
        left -= size(character)
        if left < 0:
            return f"{text[:position]}…"
    return text


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _message_header_bytes(text: str) -> float:
    """In grpc-message, where a byte that is not plain ASCII takes three, and in base64 among the details."""
    size = _utf8_bytes(text)
    plain = text.isascii() and text.isprintable() and "%" not in text
    return size * (1 if plain else 3) + size * 4 / 3
