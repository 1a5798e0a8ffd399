"""How both services serve gRPC: options, health, reflection, binding, and the interceptor that answers errors.

Used as: `server = create_server(...)`, add the servicers, `health = add_standard_services(server, names)`,
`port = await bind(server, host, port)`, `await server.start()`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.common.addresses import Address, is_port_taken
from headrace.common.errors import (
    InternalError,
    InvalidRequest,
    RequestError,
    StartupError,
    Unavailable,
    Violation,
)
from headrace.common.rpc_status import status_message, trailing_metadata

LIVENESS = "liveness"
READINESS = "readiness"

log = structlog.get_logger(__name__)


def create_server(max_receive_bytes: int) -> grpc.aio.Server:
    """A server with our interceptor and options. Messages from clients may be `max_receive_bytes` long."""
    return grpc.aio.server(
        interceptors=[ErrorInterceptor()],
        options=[
            ("grpc.max_receive_message_length", max_receive_bytes),
            ("grpc.max_send_message_length", -1),
            # A second process on the same port must fail, not silently share its connections.
            ("grpc.so_reuseport", 0),
            # Clients ping idle connections every 30 s (docs/decisions); a stricter server would answer GOAWAY.
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )


async def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listens on host:port (0 picks a free port) and returns the port. Raises StartupError if it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        # Asked first, since gRPC writes a line of its own to stderr about a port that it cannot have.
        if port and is_port_taken(Address(host, port)):
            raise StartupError(f"cannot listen on {address}: the port is taken")
    except OSError as error:
        raise StartupError(f"cannot listen on {address}: {error}") from error
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}: the port is taken, or the address is not ours") from error
    if bound == 0:
        raise StartupError(f"cannot listen on {address}")
    return bound


class Health:
    """grpc.health.v1 of one process: liveness from the start, everything else when it can serve.

    Health answers come from the event loop alone; they never queue behind inference.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", READINESS, *service_names)
        self._serving: bool | None = None

    async def start(self) -> None:
        """Alive, but not ready."""
        await self.servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)

    async def set_serving(self, serving: bool) -> None:
        """Readiness of the process and of each of its services."""
        if serving == self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)

    async def shut_down(self) -> None:
        """NOT_SERVING for good."""
        await self.servicer.enter_graceful_shutdown()


def add_standard_services(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Adds health and reflection; `service_names` are the full names of the services that the server carries."""
    result = Health(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(result.servicer, server)
    reflection.enable_server_reflection(
        (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME),
        server,
    )
    return result


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """RequestError becomes its rich status; anything unexpected becomes INTERNAL without a stack trace.

    A CancelledError that did not come from the client must not leave a handler: the client would hang
    (grpc/grpc#29248).
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(("/grpc.health.", "/grpc.reflection.")):
            return handler
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            method = getattr(handler, kind)
            if method is not None:
                wrap = _guard_generator if inspect.isasyncgenfunction(method) else _guard
                return getattr(grpc, f"{kind}_rpc_method_handler")(
                    wrap(method, handler_call_details.method),
                    request_deserializer=_refusing_garbage(handler.request_deserializer, kind.startswith("stream")),
                    response_serializer=handler.response_serializer,
                )
        return handler


def _refusing_garbage(deserialize: Callable[[bytes], Any], streams: bool) -> Callable[[bytes], Any]:
    """Where a request's bytes are no message, gives the refusal: raised into a stream's reader, else in its place.

    What a deserializer of a single request raises, gRPC would answer itself: with UNKNOWN and the name of a class.
    """

    def checked(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            refusal = InvalidRequest([Violation("request", "its bytes are not a message of this call's type")])
            if streams:
                raise refusal from None
            return refusal

    return checked


def _guard(method: Callable[[Any, Any], Awaitable[Any]], name: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            return await method(request, context)
        except BaseException as error:
            await _end_call(error, context, name)

    return guarded


def _guard_generator(
    method: Callable[[Any, Any], AsyncIterator[Any]], name: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async for response in method(request, context):
                yield response
        except BaseException as error:
            await _end_call(error, context, name)

    return guarded


async def _end_call(error: BaseException, context: Any, name: str) -> NoReturn:
    if isinstance(error, RequestError):
        await _abort(context, error)
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error  # the client, its deadline or the server's stop ended this call
        await _abort(context, Unavailable("the call was interrupted inside the server"))
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
        raise error
    log.exception("unexpected error", method=name, exc_info=error)
    await _abort(context, InternalError("internal error; the server's log has the details"))
    raise error


async def _abort(context: Any, error: RequestError) -> NoReturn:
    await context.abort(error.code, status_message(error), trailing_metadata(error))
    raise AssertionError("abort raises")
