"""One log line for each request that ended: what it cost and how it ended, never what it said."""

import asyncio
from types import TracebackType

import structlog

from headrace.common.errors import RequestError
from headrace.gateway.input_processor import Arrival
from headrace.gateway.request_stream import RequestStream

log = structlog.get_logger(__name__)


class RequestLog:
    """A context around the request; the line is written on the way out."""

    def __init__(self, request_id: str, arrival: Arrival) -> None:
        self._request_id = request_id
        self._arrival = arrival
        self._stream: RequestStream | None = None
        self._core = ""

    def __enter__(self) -> "RequestLog":
        return self

    def follow(self, stream: RequestStream, core: str) -> None:
        """The request goes to this core."""
        self._stream, self._core = stream, core

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        facts: dict[str, object] = {}
        if self._stream is not None:
            facts = {
                "core": self._core,
                "prompt_tokens": self._stream.num_prompt_tokens,
                "output_tokens": self._stream.num_output_tokens,
                "finish_reasons": self._stream.finish_reasons,
            }
        if isinstance(error, RequestError):
            facts["reason"] = error.reason
        log.info(
            "request finished",
            request_id=self._request_id,
            code=self._code(error),
            duration_s=round(self._arrival.age_s(), 4),
            **facts,
        )

    def _code(self, error: BaseException | None) -> str:
        if error is None:
            return "OK"
        if isinstance(error, RequestError):
            return error.code.name
        if isinstance(error, asyncio.CancelledError):
            timeout_s = self._arrival.timeout_s
            late = timeout_s is not None and self._arrival.age_s() >= timeout_s
            return "DEADLINE_EXCEEDED" if late else "CANCELLED"
        return "INTERNAL"
