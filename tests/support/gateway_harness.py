"""A gateway on loopback before fake cores, with a tokenizer of bytes: id i is byte i, so scripts read as text."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.common.byte_tokenizer import BOS_ID, EOS_ID, byte_tokenizer_files
from headrace.common.errors import RequestError
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.config import GatewayConfig, LimitsConfig, ServerConfig
from headrace.gateway.core_client import LogprobRow
from headrace.gateway.server import GatewayServer
from headrace.gateway_api.v1 import generation_pb2 as pb
from headrace.gateway_api.v1 import models_pb2
from headrace.gateway_api.v1.admin_pb2_grpc import AdminServiceStub
from headrace.gateway_api.v1.generation_pb2_grpc import GenerationServiceStub
from headrace.gateway_api.v1.models_pb2_grpc import ModelServiceStub

EOS, SECOND_EOS = EOS_ID, BOS_ID
VOCAB_SIZE = 258
KINDS = [pb.OUTPUT_KIND_DELTA, pb.OUTPUT_KIND_CUMULATIVE, pb.OUTPUT_KIND_FINAL_ONLY]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception('no booms here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model_files() -> TokenizerFiles:
    """The byte tokenizer with a chat template, and a second token that ends an output."""
    config = json.dumps({"eos_token_id": [EOS, SECOND_EOS]}).encode()
    return TokenizerFiles.from_files({**byte_tokenizer_files(TEMPLATE).files, "generation_config.json": config})


def next_letter(last: int, _seed: int) -> int:
    """a, b, c, ... z, a, ..."""
    return ord("a") + (last - ord("a") + 1) % 26 if ord("a") <= last <= ord("z") else ord("a")


@dataclass
class Outcome:
    """What a Generate call gave: all messages, and the error that ended it, if one did."""

    messages: list[pb.GenerateResponse]
    error: grpc.aio.AioRpcError | None

    def text(self, index: int = 0) -> str:
        return "".join(o.text for m in self.messages for o in m.outputs if o.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [t for m in self.messages for o in m.outputs if o.index == index for t in o.token_ids]

    def last(self, index: int = 0) -> pb.CompletionOutput:
        return [o for m in self.messages for o in m.outputs if o.index == index][-1]

    @property
    def usage(self) -> pb.Usage:
        return self.messages[-1].usage


class Client:
    """Stubs of one gateway."""

    def __init__(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.generation: Any = GenerationServiceStub(self.channel)
        self.models: Any = ModelServiceStub(self.channel)
        self.admin: Any = AdminServiceStub(self.channel)

    async def generate(self, request: pb.GenerateRequest, deadline_s: float = 20) -> Outcome:
        messages: list[pb.GenerateResponse] = []
        try:
            async for message in self.generation.Generate(request, timeout=deadline_s):
                messages.append(message)  # noqa: PERF401 - what came before an error is kept
        except grpc.aio.AioRpcError as error:
            return Outcome(messages, error)
        return Outcome(messages, None)

    async def load(self) -> models_pb2.GetLoadResponse:
        answer: models_pb2.GetLoadResponse = await self.models.GetLoad(models_pb2.GetLoadRequest())
        return answer


class RecordingSink:
    """A `CompletionSink` that only remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self.events.append(("tokens", list(token_ids)))

    def on_logprobs(self, position: int, row: LogprobRow) -> None:
        self.events.append(("logprobs", (position, row)))

    def on_prompt_logprobs(self, position: int, row: LogprobRow) -> None:
        self.events.append(("prompt", (position, row)))

    def on_logprobs_lost(self, error: RequestError) -> None:
        self.events.append(("lost", error))

    def on_finished(self, finished: core_pb.Finished) -> None:
        self.events.append(("finished", finished.reason))

    def on_failed(self, error: RequestError) -> None:
        self.events.append(("failed", error))


def final_text(outcome: Outcome, kind: pb.OutputKind.ValueType, index: int = 0) -> str:
    return outcome.text(index) if kind == pb.OUTPUT_KIND_DELTA else outcome.last(index).text


@dataclass
class Gateway:
    """A running gateway."""

    server: GatewayServer
    address: str
    client: Client
    work: asyncio.Task[None]


def text_request(text: str, **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt=pb.Prompt(text=text))
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return request


async def eventually(condition: Callable[[], Any]) -> None:
    """Waits until the condition, a function or coroutine function, holds."""
    async with asyncio.timeout(10):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_gateway(*cores: str, **limits: Any) -> AsyncIterator[Gateway]:
    config = GatewayConfig(cores=cores, server=ServerConfig(port=0, drain_grace=5.0), limits=LimitsConfig(**limits))
    server = GatewayServer(config)
    port = await server.start()
    work = asyncio.create_task(server.run())
    client = Client(f"127.0.0.1:{port}")
    try:
        yield Gateway(server, f"127.0.0.1:{port}", client, work)
    finally:
        work.cancel()
        await asyncio.wait({work})
        await client.channel.close()
        await server.close()


async def serving(client: Client, num_cores: int = 1) -> None:
    """Waits until so many cores take requests."""

    async def served() -> bool:
        states = [core.state for core in (await client.load()).cores]
        return states.count(models_pb2.CORE_STATE_SERVING) == num_cores

    await eventually(served)
