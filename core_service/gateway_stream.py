"""One Connect stream, from Hello to its end: requests in, step outputs out.

One task reads, one writes (two concurrent writes would end a grpc.aio stream). When the stream ends, however it does,
its requests are aborted.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from google.protobuf.message import DecodeError
from google.rpc.code_pb2 import Code

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import (
    EngineDeadError,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
    Violation,
)
from headrace.common.params_wire import duration
from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import refusal
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine import Engine
from headrace.core_service.outbox import Outbox

HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 1.0
MAX_OUTBOX_BYTES = 64 << 20
MAX_SLOT = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamEnvironment:
    """What all streams of a core share."""

    engine: Engine
    blobs: BlobStore
    info: pb.CoreInfo


class _RequestIds(NamedTuple):
    """What a request is called in the logs."""

    external: str
    internal: str


class GatewayStream:
    """The core's end of a gateway's stream."""

    def __init__(self, environment: StreamEnvironment) -> None:
        self._engine = environment.engine
        self._blobs = environment.blobs
        self._info = environment.info
        self._outbox = Outbox(MAX_OUTBOX_BYTES)
        self._live: dict[int, _RequestIds] = {}  # by slot, until the terminal row is written
        self._end: RequestError | None = None

    async def run(self, hello: pb.Hello, requests: AsyncIterator[pb.ConnectRequest], context: Any) -> None:
        """Serves the stream until the gateway ends it. Raises RequestError for the status that it must end with."""
        check_hello(hello, self._info)
        await context.write(pb.ConnectResponse(welcome=pb.Welcome(info=self._info)))
        log.info("gateway connected", gateway=hello.gateway_epoch, peer=context.peer())
        client = self._engine.connect(self._outbox.offer)
        tasks = [
            asyncio.create_task(self._read(requests, client)),
            asyncio.create_task(self._write(context)),
            asyncio.create_task(self._outbox.overflowed.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended the stream
            if self._outbox.overflowed.is_set():
                raise Overloaded("the gateway does not read its stream", reason="SLOW_GATEWAY")
        except EngineDeadError as error:
            raise InternalError(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            self._outbox.close()
            if self._engine.alive:
                self._engine.disconnect(client)
            log.info("gateway gone", gateway=hello.gateway_epoch)

    def drain(self, grace_s: float) -> None:
        """Tells the gateway that this core is going away."""
        self._outbox.offer(pb.ConnectResponse(draining=pb.Draining(grace=duration(grace_s))))

    def end(self, error: RequestError) -> None:
        """Ends the stream with a status once everything before it is written."""
        self._end = error
        self._outbox.offer(pb.ConnectResponse())

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest], client: int) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "add":
                self._add(client, list(request.add.requests))
            elif kind == "abort":
                if len(request.abort.slots) != len(request.abort.internal_ids):
                    raise _breach("abort", "slots and internal_ids must be of one length")
                self._engine.abort(client, list(request.abort.slots), list(request.abort.internal_ids))
            else:
                raise _breach("message", f"must be add or abort after hello; got {kind}")

    def _add(self, client: int, messages: list[pb.EngineCoreRequest]) -> None:
        ready = []
        for message in messages:
            for child in message.children:
                if child.slot >= MAX_SLOT:
                    raise _breach("slot", f"must be below {MAX_SLOT}; got {child.slot}")
                if child.slot in self._live:
                    raise _breach("slot", f"{child.slot} is in use until its terminal row has arrived")
                self._live[child.slot] = _RequestIds(message.external_id, message.internal_id)
            try:
                whole = self._with_body(message)
            except RequestError as error:
                for response in refusal(message, error):
                    self._outbox.offer(response)
                continue
            if whole is not message:
                ids = _RequestIds(whole.external_id, whole.internal_id)
                self._live.update((child.slot, ids) for child in whole.children)
            ready.append(whole)
        self._engine.add(client, ready)

    def _with_body(self, message: pb.EngineCoreRequest) -> pb.EngineCoreRequest:
        """The request itself where it was too large for the stream: its blob, under the id and slots of `message`."""
        if not message.body_digest:
            return message
        try:
            body = pb.EngineCoreRequest.FromString(self._blobs.get(message.body_digest))
        except DecodeError as error:
            raise InvalidRequest([Violation("body_digest", "the blob is not an EngineCoreRequest")]) from error
        if len(body.children) != len(message.children):
            raise _breach("children", "the body must have as many as the message that names it")
        body.internal_id = message.internal_id
        for child, named in zip(body.children, message.children, strict=True):
            child.slot = named.slot
        return body

    async def _write(self, context: Any) -> None:
        """Writes until it is told to end. Everything that is written passes here."""
        while True:
            message = await self._outbox.take(HEARTBEAT_S)
            if message is None:
                message = pb.ConnectResponse()
                message.heartbeat.stats.CopyFrom(self._engine.load())
                message.heartbeat.healthy = self._engine.healthy
            elif message.WhichOneof("message") is None:
                raise self._end or Unavailable("the core ended the stream")
            for record in message.step.finished:
                self._log_end(self._live.pop(record.slot), record)
            await context.write(message)

    def _log_end(self, ids: "_RequestIds", record: pb.Finished) -> None:
        """One line a completion, on the event loop: the engine's thread has better things to do."""
        log.info(
            "completion ended",
            request_id=ids.external,
            internal_id=ids.internal,
            reason=FinishReason.Name(record.reason).removeprefix("FINISH_REASON_"),
            code=Code.Name(record.code),
            message=record.message,
            cached_tokens=record.cached_tokens,
            preemptions=record.timing.preemptions,
        )


async def read_hello(requests: AsyncIterator[pb.ConnectRequest]) -> pb.Hello:
    """The first message of a stream. Raises InvalidRequest if it is something else or does not come."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise _breach("hello", f"did not come within {HELLO_TIMEOUT_S:g} s") from error
    if first is None or first.WhichOneof("message") != "hello":
        raise _breach("hello", "must be the first message of a stream")
    return first.hello


def check_hello(hello: pb.Hello, info: pb.CoreInfo) -> None:
    """Raises FailedPrecondition if this core is not what the gateway expects."""
    if hello.contract_version.split(".")[0] != CONTRACT_VERSION.split(".")[0]:
        raise FailedPrecondition(
            f"contract version {hello.contract_version} does not work with this core's {CONTRACT_VERSION}",
            reason="CONTRACT_VERSION_MISMATCH",
        )
    missing = sorted(set(hello.required_features) - set(info.features))
    if missing:
        raise FailedPrecondition(f"this core lacks the features {', '.join(missing)}", reason="FEATURE_MISSING")
    if hello.model and hello.model != info.model:
        raise FailedPrecondition(f"this core serves {info.model}, not {hello.model}", reason="MODEL_MISMATCH")
    if hello.tokenizer_digest and hello.tokenizer_digest != info.tokenizer_digest:
        raise FailedPrecondition(
            f"the gateway's tokenizer {hello.tokenizer_digest[:12]} is not this core's {info.tokenizer_digest[:12]}",
            reason="TOKENIZER_MISMATCH",
        )


def _breach(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, description)], reason="PROTOCOL_BREACH")
