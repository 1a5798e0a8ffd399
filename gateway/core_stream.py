"""One Connect stream to a core: handshake, the one writer, the one reader, and the slots that live on it.

Two writes at once would end a grpc.aio stream, so everything to be sent goes through one queue and one task. The queue
holds at most one entry for each live request and each live completion's abort, so it is bounded by the slots.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.message import DecodeError

from headrace.common.errors import FailedPrecondition, InternalError, RequestError, Unavailable
from headrace.common.rpc_status import from_rpc_error
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.blobs import get_blob
from headrace.gateway.core_client import CompletionSink
from headrace.gateway.slots import SlotTable
from headrace.gateway.step_demux import deliver_logprobs, deliver_prompt_logprobs, deliver_step

if TYPE_CHECKING:  # it exists for type checkers only
    from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceAsyncStub

MAX_CONNECT_MESSAGE_BYTES = 240 * 1024  # the contract's bound is 256 KiB
WELCOME_TIMEOUT_S = 10.0
# What grpc.aio says, as INTERNAL, when the peer ended the call while we wrote; the peer's own status is lost then.
_WRITE_FAILED = "Internal error from Core"

ConnectCall = grpc.aio.StreamStreamCall[core_pb.ConnectRequest, core_pb.ConnectResponse]
Outgoing = core_pb.EngineCoreRequest | tuple[int, str]  # a request to add, or slot and internal id to abort

log = structlog.get_logger(__name__)


class CoreStream:
    """Lives from the handshake to the first fault. `on_event` sees every message from the core that is not a step."""

    def __init__(
        self,
        call: ConnectCall,
        bulk: "EngineCoreServiceAsyncStub",
        on_event: Callable[[core_pb.ConnectResponse], None],
    ) -> None:
        self._call = call
        self._bulk = bulk
        self._on_event = on_event
        self._slots = SlotTable()
        self._outbox: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._blob_tasks: set[asyncio.Task[None]] = set()
        self._broken = False
        self.last_message_at = asyncio.get_running_loop().time()

    @property
    def live_completions(self) -> int:
        """Completions without a terminal row."""
        return self._slots.num_live

    async def handshake(self, hello: core_pb.Hello) -> core_pb.CoreInfo:
        """Hello, then Welcome. Raises RequestError with the core's own words if it refuses."""
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await self._call.write(core_pb.ConnectRequest(hello=hello))
                answer = await self._call.read()
        except TimeoutError as error:
            raise Unavailable(f"no Welcome within {WELCOME_TIMEOUT_S:g} s") from error
        except asyncio.InvalidStateError as error:  # the call had ended before the write
            raise Unavailable("the core ended the stream before it had read Hello") from error
        except grpc.aio.AioRpcError as error:
            if error.details() == _WRITE_FAILED:
                raise Unavailable("the core ended the stream before it had read Hello") from error
            raise from_rpc_error(error) from error
        if not isinstance(answer, core_pb.ConnectResponse) or answer.WhichOneof("message") != "welcome":
            raise FailedPrecondition("the peer did not answer Hello with Welcome; is it a headrace core?")
        self._on_event(answer)
        return answer.welcome.info

    async def run(self) -> None:
        """Reads and writes until the stream ends, then raises RequestError; every live sink has got the same error."""
        writer = asyncio.create_task(self._write_all(), name="core-stream-writer")
        error: RequestError = Unavailable("the gateway closed the stream to the core")
        try:
            await self._read_all()
            error = Unavailable("the core closed the stream")
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        except RequestError as refusal:  # `on_event` wants no more of this core
            error = refusal
        except (KeyError, ValueError) as breach:
            log.exception("core broke the protocol", exc_info=breach)
            error = Unavailable(f"the core broke the protocol: {breach}")
        finally:
            self._broken = True
            writer.cancel()
            for task in self._blob_tasks:
                task.cancel()
            self._call.cancel()
            lost = Unavailable(f"the core was lost: {error.message}", reason="CORE_LOST")
            for sink in self._slots.clear():
                sink.on_failed(lost)
        raise error

    def add(self, request: core_pb.EngineCoreRequest, sinks: Sequence[CompletionSink]) -> list[int]:
        """Takes a slot for each child, writes them into the request and queues it. Raises Unavailable when broken."""
        if self._broken:
            raise Unavailable("the stream to the core is gone", reason="CORE_LOST")
        slots = self._slots.allocate(request.internal_id, sinks)
        for child, slot in zip(request.children, slots, strict=True):
            child.slot = slot
        self._outbox.put_nowait(request)
        return slots

    def abort(self, slot: int, internal_id: str) -> None:
        """Queues an abort, unless the slot no longer stands for that request."""
        if not self._broken and self._slots.holds(slot, internal_id):
            self._outbox.put_nowait((slot, internal_id))

    async def _write_all(self) -> None:
        while True:
            waiting = [await self._outbox.get()]
            while not self._outbox.empty():
                waiting.append(self._outbox.get_nowait())
            for message in pack_messages(waiting):
                try:
                    await self._call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the stream has ended; the reader learns why and tells everybody

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        while isinstance(message := await self._call.read(), core_pb.ConnectResponse):
            self.last_message_at = loop.time()
            if message.WhichOneof("message") == "step":
                self._take_step(message.step)
            self._on_event(message)

    def _take_step(self, step: core_pb.StepOutputs) -> None:
        columns = (
            (step.prompt_logprobs.blob_digests, deliver_prompt_logprobs),
            (step.logprobs.blob_digests, deliver_logprobs),
        )
        for digests, deliver in columns:
            if digests:
                # The blob comes after this step's terminal rows have freed their slots: it needs the table as it is.
                fetch = self._fetch_logprobs(list(digests), deliver, self._slots.snapshot())
                task = asyncio.create_task(fetch, name="core-stream-blob")
                self._blob_tasks.add(task)
                task.add_done_callback(self._blob_tasks.discard)
        deliver_step(step, self._slots)

    async def _fetch_logprobs(
        self,
        digests: Iterable[str],
        deliver: Callable[[core_pb.LogprobColumns, SlotTable], None],
        table: SlotTable,
    ) -> None:
        error: RequestError | None = Unavailable(
            "the core was lost before its log-probabilities came", reason="CORE_LOST"
        )
        try:
            for digest in digests:
                deliver(core_pb.LogprobColumns.FromString(await get_blob(self._bulk, digest)), table)
            error = None
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        except (KeyError, ValueError, DecodeError) as breach:
            error = InternalError(f"the core sent log-probabilities that cannot be read: {breach}")
        except RequestError as request_error:
            error = request_error
        finally:
            if error is not None:
                # Which completions a lost blob was for, nobody can tell: all those fail that still wait for rows.
                for sink in table.clear():
                    sink.on_logprobs_lost(error)


def pack_messages(waiting: Iterable[Outgoing]) -> Iterator[core_pb.ConnectRequest]:
    """As few messages as the size bound allows, in the same order: an abort never overtakes its request."""
    message = core_pb.ConnectRequest()
    size = 0
    for item in waiting:
        kind, item_size = ("abort", len(item[1]) + 8) if isinstance(item, tuple) else ("add", item.ByteSize() + 8)
        if size and (message.WhichOneof("message") != kind or size + item_size > MAX_CONNECT_MESSAGE_BYTES):
            yield message
            message, size = core_pb.ConnectRequest(), 0
        if isinstance(item, tuple):
            message.abort.slots.append(item[0])
            message.abort.internal_ids.append(item[1])
        else:
            message.add.requests.append(item)
        size += item_size
    if size:
        yield message
