"""Every error that headrace raises on purpose.

HeadraceError
├── RequestError               one request fails, everything else goes on; has a gRPC status code and a reason
│   ├── InvalidRequest         INVALID_ARGUMENT     every violated field is listed
│   ├── NotFound               NOT_FOUND            unknown model, adapter, blob
│   ├── AlreadyExists          ALREADY_EXISTS       a live request has this id
│   ├── FailedPrecondition     FAILED_PRECONDITION  the peer is in the wrong state or of the wrong kind
│   ├── Unimplemented          UNIMPLEMENTED        a named feature that this release does not have
│   ├── Overloaded             RESOURCE_EXHAUSTED   come back after retry_delay_s
│   ├── Unavailable            UNAVAILABLE          no core, or the core went away; may succeed later
│   ├── DeadlineExceeded       DEADLINE_EXCEEDED    the request's time is over
│   ├── Cancelled              CANCELLED            the client or an operator gave up
│   └── InternalError          INTERNAL             our fault
├── StartupError               the process cannot start: one clear line, exit code 1
│   ├── ConfigError            every wrong setting in one message
│   └── ModelLoadError         the model's files are missing, damaged or of a kind that is not supported
└── EngineDeadError            the engine thread is gone: streams end, health flips, the process exits

`headrace.common.rpc_status` turns a RequestError into a rich gRPC status and back; no other place names status codes.
"""

from dataclasses import dataclass
from typing import ClassVar

import grpc


class HeadraceError(Exception):
    """Root of the tree."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field of a request.

    `field` is its path in the public request, such as `sampling.temperature`; `description` names value and limit.
    """

    field: str
    description: str


class RequestError(HeadraceError):
    """One request fails; the process, the stream and the neighbours do not.

    `violations` names the fields of the request that are to blame, where some are.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations: list[Violation] = []


class InvalidRequest(RequestError):
    """The request breaks rules; `violations` names every one of them."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"

    def __init__(self, violations: list[Violation], *, reason: str | None = None) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), reason=reason)
        self.violations = violations


class NotFound(RequestError):
    """What the request names, in `field` if that is given, does not exist here."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"

    def __init__(self, message: str, *, field: str | None = None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        if field is not None:
            self.violations = [Violation(field, message)]


class AlreadyExists(RequestError):
    """A live request has the same id."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "REQUEST_ID_IN_USE"


class FailedPrecondition(RequestError):
    """The peer is in the wrong state, or is not what the caller expects."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Unimplemented(RequestError):
    """A feature of the contract that this release does not have; the message names the field or the call."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Overloaded(RequestError):
    """Refused before any work was done."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_delay_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_delay_s = retry_delay_s


class Unavailable(RequestError):
    """Nobody can serve this now; the same request may succeed later or elsewhere."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_delay_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_delay_s = retry_delay_s


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(RequestError):
    """The client, or an operator, gave up on the request."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class DataLoss(RequestError):
    """Bytes that arrived are not those of their digest."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class InternalError(RequestError):
    """A fault of ours; the message never holds a stack trace."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


class StartupError(HeadraceError):
    """The process cannot start. The command line prints the message as one line and exits with 1."""


class ConfigError(StartupError):
    """Settings that do not hold; lists every one of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ModelLoadError(StartupError):
    """The model's files are missing, damaged, or of a kind that is not supported; the message names file and reason."""


class EngineDeadError(HeadraceError):
    """The engine thread has ended on a fault; nothing can be served until the process restarts."""
