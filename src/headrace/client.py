"""A small Python client of a gateway: the public contract with typed errors.

    with Client("127.0.0.1:50051") as client:
        for message in client.generate(GenerateRequest(prompt=text_prompt("The sea is"))):
            print(message.outputs[0].text, end="")

`AsyncClient` has the same methods for asyncio. Every failed call raises a `headrace.common.errors.RequestError`.
Closing the generator of `generate` ends the call, and the gateway aborts the request.
"""

import contextlib
import functools
import re
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common import rpc_status
from headrace.common.addresses import parse_address
from headrace.common.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable, Unimplemented
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import generation_pb2_grpc, models_pb2, models_pb2_grpc

DEFAULT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20
# Beginnings of what gRPC says when no connection comes about.
_UNREACHABLE = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_TOO_LARGE = re.compile(
    r"((?P<side>SERVER|CLIENT): )?(?P<way>Sent|Received) message larger than max \((?P<size>\d+) vs\. (?P<limit>\d+)\)"
)


def text_prompt(text: str) -> pb.Prompt:
    """A prompt that the gateway tokenizes."""
    return pb.Prompt(text=text)


def token_prompt(ids: Iterable[int]) -> pb.Prompt:
    """A prompt of token ids, used as they are."""
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def chat_prompt(messages: Iterable[tuple[str, str]]) -> pb.Prompt:
    """A prompt of (role, content) messages, rendered by the model's template."""
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]))


def channel_options(server: str) -> list[tuple[str, Any]]:
    """gRPC channel options for a server: message limits and keepalive."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if parse_address(server).is_loopback:
        options.append(("grpc.enable_http_proxy", 0))
    return options


class AsyncClient:
    """A gateway, for asyncio. Use it with `async with`, or call `close`."""

    def __init__(self, server: str) -> None:
        """Connects at the first call. ValueError if `server` is not host:port."""
        self._typed_errors = functools.partial(_typed_errors, server)
        self._channel = grpc.aio.insecure_channel(server, options=channel_options(server))
        self._generation: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(
            self._channel
        )
        self._models: models_pb2_grpc.ModelServiceAsyncStub = models_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        await self._channel.close()

    async def generate(
        self, request: pb.GenerateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of one request, which must be over after `deadline_s` seconds."""
        call = self._generation.Generate(request, timeout=deadline_s)
        try:
            with self._typed_errors(deadline_s):
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def tokenize(self, prompt: pb.Prompt, *, add_special_tokens: bool = True) -> pb.TokenizeResponse:
        """Ids of a text or chat prompt."""
        request = pb.TokenizeRequest(prompt=prompt, add_special_tokens=add_special_tokens)
        with self._typed_errors():
            return await self._generation.Tokenize(request, timeout=DEFAULT_TIMEOUT_S)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        with self._typed_errors():
            return (await self._generation.Detokenize(request, timeout=DEFAULT_TIMEOUT_S)).text

    async def list_models(self) -> list[models_pb2.Model]:
        """Models and adapters served now."""
        with self._typed_errors():
            response = await self._models.ListModels(models_pb2.ListModelsRequest(), timeout=DEFAULT_TIMEOUT_S)
        return list(response.models)

    async def get_model(self, name: str = "") -> models_pb2.Model:
        """Facts and limits of a model; the name may be empty where there is only one."""
        with self._typed_errors():
            response = await self._models.GetModel(models_pb2.GetModelRequest(name=name), timeout=DEFAULT_TIMEOUT_S)
        return response.model

    async def get_load(self) -> models_pb2.GetLoadResponse:
        """Live requests, and the cores with their load."""
        with self._typed_errors():
            return await self._models.GetLoad(models_pb2.GetLoadRequest(), timeout=DEFAULT_TIMEOUT_S)

    async def health(self, service: str = "", *, timeout_s: float = 5.0) -> str:
        """State of the server or of one of its services, such as SERVING or NOT_SERVING."""
        with self._typed_errors(timeout_s):
            response = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        return _state_name(response)


class Client:
    """A gateway, for code without asyncio. Use it with `with`, or call `close`."""

    def __init__(self, server: str) -> None:
        """Connects at the first call. ValueError if `server` is not host:port."""
        self._typed_errors = functools.partial(_typed_errors, server)
        self._channel = grpc.insecure_channel(server, options=channel_options(server))
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = models_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()

    def generate(
        self, request: pb.GenerateRequest, *, deadline_s: float | None = None
    ) -> Generator[pb.GenerateResponse, None, None]:
        """The messages of one request, which must be over after `deadline_s` seconds."""
        call = self._generation.Generate(request, timeout=deadline_s)
        try:
            with self._typed_errors(deadline_s):
                yield from call
        finally:
            call.cancel()

    def tokenize(self, prompt: pb.Prompt, *, add_special_tokens: bool = True) -> pb.TokenizeResponse:
        """Ids of a text or chat prompt."""
        request = pb.TokenizeRequest(prompt=prompt, add_special_tokens=add_special_tokens)
        with self._typed_errors():
            return self._generation.Tokenize(request, timeout=DEFAULT_TIMEOUT_S)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        with self._typed_errors():
            return self._generation.Detokenize(request, timeout=DEFAULT_TIMEOUT_S).text

    def list_models(self) -> list[models_pb2.Model]:
        """Models and adapters served now."""
        with self._typed_errors():
            response = self._models.ListModels(models_pb2.ListModelsRequest(), timeout=DEFAULT_TIMEOUT_S)
        return list(response.models)

    def get_model(self, name: str = "") -> models_pb2.Model:
        """Facts and limits of a model; the name may be empty where there is only one."""
        with self._typed_errors():
            response = self._models.GetModel(models_pb2.GetModelRequest(name=name), timeout=DEFAULT_TIMEOUT_S)
        return response.model

    def get_load(self) -> models_pb2.GetLoadResponse:
        """Live requests, and the cores with their load."""
        with self._typed_errors():
            return self._models.GetLoad(models_pb2.GetLoadRequest(), timeout=DEFAULT_TIMEOUT_S)

    def health(self, service: str = "", *, timeout_s: float = 5.0) -> str:
        """State of the server or of one of its services, such as SERVING or NOT_SERVING."""
        with self._typed_errors(timeout_s):
            response = self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        return _state_name(response)


@contextlib.contextmanager
def _typed_errors(server: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Generator[None, None, None]:
    try:
        yield
    except grpc.RpcError as error:
        # Both kinds of gRPC error have the same methods; only asyncio's has a class with them.
        raise _request_error(cast("grpc.aio.AioRpcError", error), server, timeout_s) from error


def _request_error(error: grpc.aio.AioRpcError, server: str, timeout_s: float | None) -> RequestError:
    """The error behind a failed call. What gRPC itself says in its own words is said in ours, with the same code."""
    result = rpc_status.from_rpc_error(error)
    if any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ()):
        return result  # the server's own answer
    if isinstance(result, Unavailable) and result.message.startswith(_UNREACHABLE):
        return Unavailable(
            f"cannot reach {server}: {_why_unreachable(result.message)}; is a gateway running there? "
            "(`headrace up --model demo` starts one)"
        )
    if isinstance(result, Unimplemented) and result.message == "Method not found!":
        return Unimplemented(f"{server} is not a headrace gateway (a core?)")
    if isinstance(result, DeadlineExceeded) and timeout_s is not None:
        duration = f"{timeout_s:g} s" if timeout_s >= 1 else f"{timeout_s * 1000:g} ms"
        return DeadlineExceeded(f"the deadline of {duration} passed")
    if isinstance(result, Overloaded) and (sizes := _TOO_LARGE.search(result.message)):
        return Overloaded(_too_large(sizes), retry_delay_s=result.retry_delay_s)
    return result


def _why_unreachable(message: str) -> str:
    if "resol" in message:
        return "the host name cannot be resolved"
    reason = message.rpartition("remote host: ")[2]
    return reason[:1].lower() + reason[1:]


def _too_large(sizes: re.Match[str]) -> str:
    size, limit = f"{sizes['size']} bytes", f"{sizes['limit']} bytes"
    if sizes["way"] == "Sent":
        return f"the request has {size}, this client sends at most {limit}"
    if sizes["side"] == "CLIENT":
        return f"the answer has {size}, this client takes at most {limit}"
    return f"the request has {size}, the server takes at most {limit} (the gateway's --max-message-bytes)"


def _state_name(response: health_pb2.HealthCheckResponse) -> str:
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name
