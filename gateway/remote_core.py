"""A core in another process: keeps one Connect stream to it, comes back after every loss, and offers it as CoreClient.

Bulk (tokenizer files, blobs) and control calls use a second connection, so that nothing stands in front of tokens.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog

from headrace.common.contract_version import CONTRACT_VERSION
from headrace.common.errors import FailedPrecondition, InternalError, RequestError, Unavailable
from headrace.common.params_wire import seconds
from headrace.common.rpc_status import from_rpc_error
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceStub
from headrace.gateway.blobs import put_blob
from headrace.gateway.core_client import CompletionSink
from headrace.gateway.core_stream import MAX_CONNECT_MESSAGE_BYTES, CoreStream
from headrace.gateway.handshake import check_contract
from headrace.gateway_api.v1 import models_pb2

if TYPE_CHECKING:  # it exists for type checkers only
    from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceAsyncStub

SILENCE_LIMIT_S = 4.0  # a live core says something every second
LOAD_TIMEOUT_S = 1.0
MAX_TOLD = 20
FIRST_RETRY_S = 0.1
# A core that is not there yet must be found soon after it comes; one that refused us will likely refuse again.
LONGEST_RETRY_S = 0.4
LONGEST_RETRY_AFTER_REFUSAL_S = 5.0
# Beside a request that went by blob, its message holds only the internal id and the slots.
MAX_INLINE_REQUEST_BYTES = MAX_CONNECT_MESSAGE_BYTES - 1024
SLOT_BYTES = 4  # tag and varint; slots are written when the request is queued

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Back-off is ours: the channel must try at once when we do.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Expectations:
    """What a gateway tells a core in Hello; empty accepts any."""

    gateway_epoch: str
    model: str
    tokenizer_digest: str


class RemoteCore:
    """`CoreClient` over gRPC.

    `expectations` is asked at each connection attempt. `prepare` is awaited while the core is not available, for what
    can be had from it even so. `admit` is awaited with the facts of a core that has answered,
    before it gets any request, and again (as `update`) when they change; it raises RequestError to refuse it.
    """

    def __init__(
        self,
        address: str,
        expectations: Callable[[], Expectations],
        prepare: Callable[["RemoteCore"], Awaitable[None]],
        admit: Callable[["RemoteCore", core_pb.CoreInfo], Awaitable[None]],
        update: Callable[["RemoteCore", core_pb.CoreInfo], None],
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._expectations = expectations
        self._prepare = prepare
        self._admit = admit
        self._update = update
        self._on_change = on_change
        self._data_channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._bulk_channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._data: EngineCoreServiceAsyncStub = EngineCoreServiceStub(self._data_channel)
        self.bulk: EngineCoreServiceAsyncStub = EngineCoreServiceStub(self._bulk_channel)
        self._info: core_pb.CoreInfo | None = None
        self._stats = core_pb.SchedulerStats()
        self._stream: CoreStream | None = None  # set while the core takes requests
        self._healthy = True
        self._draining = False

    @property
    def address(self) -> str:
        """Host and port."""
        return self._address

    @property
    def state(self) -> models_pb2.CoreState.ValueType:
        """As far as its messages, or their absence, tell."""
        if self._stream is None:
            return models_pb2.CORE_STATE_CONNECTING
        if self._draining:
            return models_pb2.CORE_STATE_DRAINING
        silence = asyncio.get_running_loop().time() - self._stream.last_message_at
        if not self._healthy or silence > SILENCE_LIMIT_S:
            return models_pb2.CORE_STATE_UNHEALTHY
        return models_pb2.CORE_STATE_SERVING

    @property
    def info(self) -> core_pb.CoreInfo | None:
        """From its last Welcome, also while it is lost."""
        return self._info

    @property
    def stats(self) -> core_pb.SchedulerStats:
        """From its last step or heartbeat."""
        return self._stats

    @property
    def live_completions(self) -> int:
        """On the present stream."""
        return self._stream.live_completions if self._stream else 0

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        attempt = 0
        told: set[str] = set()  # reasons logged since the core was last there: one line for each, not for each attempt
        while True:
            try:
                await self._connect_and_serve()
            except Exception as fault:  # a fault of ours must cost this core's stream, not the whole gateway
                error = fault if isinstance(fault, RequestError) else self._internal(fault)
                served = self._stream is not None
                self._stream = None
                self._on_change()
                if served:
                    log.warning("core lost", core=self._address, reason=error.message)
                elif error.message not in told:
                    # A core that is not there yet is how every start looks; one that refuses is somebody's mistake.
                    level = log.info if isinstance(error, Unavailable) else log.warning
                    level("waiting for the core", core=self._address, reason=error.message)
                if isinstance(error, Unavailable) and not served:
                    await self._prepare(self)
                attempt = 0 if served else attempt + 1
                told = set() if served or len(told) > MAX_TOLD else {*told, error.message}
                await asyncio.sleep(retry_delay(attempt, refused=isinstance(error, FailedPrecondition)))

    def _internal(self, fault: Exception) -> RequestError:
        log.exception("fault in the link to a core", core=self._address, exc_info=fault)
        return InternalError("the gateway's link to the core failed; its log says why")

    async def close(self) -> None:
        """Closes both connections; `run` must have been cancelled."""
        await self._data_channel.close()
        await self._bulk_channel.close()

    async def submit(self, request: core_pb.EngineCoreRequest, sinks: Sequence[CompletionSink]) -> "RemoteSubmission":
        """Sends a request, by blob if it is too long for the stream."""
        sent = request
        if request.ByteSize() + SLOT_BYTES * len(request.children) > MAX_INLINE_REQUEST_BYTES:
            sent = core_pb.EngineCoreRequest(
                internal_id=request.internal_id,
                children=[core_pb.Child(index=child.index) for child in request.children],
                body_digest=await self._put(request.SerializeToString()),
            )
        if self._stream is None:
            raise Unavailable(f"core {self._address} was lost before it took the request", reason="CORE_LOST")
        return RemoteSubmission(self._stream, request.internal_id, self._stream.add(sent, sinks))

    async def load(self) -> core_pb.SchedulerStats:
        """Asks the core; the stream's own news is up to a second old."""
        try:
            answer = await self.bulk.GetLoad(core_pb.GetLoadRequest(), timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return self._stats  # the state that goes with it says how much it is worth
        return answer.stats

    async def _put(self, payload: bytes) -> str:
        try:
            return await put_blob(self.bulk, payload)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _connect_and_serve(self) -> None:
        wanted = self._expectations()
        self._healthy, self._draining = True, False
        call = self._data.Connect()
        try:
            stream = CoreStream(call, self.bulk, self._take_event)
            info = await stream.handshake(
                core_pb.Hello(
                    contract_version=CONTRACT_VERSION,
                    gateway_epoch=wanted.gateway_epoch,
                    tokenizer_digest=wanted.tokenizer_digest,
                    model=wanted.model,
                )
            )
            check_contract(info.contract_version)
            await self._admit(self, info)
            self._stream = stream
            log.info("core connected", core=self._address, model=info.model, numerics_id=info.numerics_id)
            self._on_change()
            await stream.run()
        finally:
            call.cancel()

    def _take_event(self, message: core_pb.ConnectResponse) -> None:
        kind = message.WhichOneof("message")
        before = self._healthy, self._draining
        if kind == "step":
            self._healthy = True  # a step finished: that is progress
            if message.step.HasField("stats"):
                self._stats = message.step.stats
        elif kind == "heartbeat":
            self._healthy = message.heartbeat.healthy
            self._stats = message.heartbeat.stats
        elif kind == "draining":
            self._draining = True
            log.info("core draining", core=self._address, grace_s=seconds(message.draining.grace))
        elif kind == "welcome":
            self._info = message.welcome.info
            if self._stream is not None:
                self._update(self, message.welcome.info)
        if before != (self._healthy, self._draining):
            self._on_change()


class RemoteSubmission:
    """A request on a stream; after the stream is gone, aborting does nothing."""

    def __init__(self, stream: CoreStream, internal_id: str, slots: Sequence[int]) -> None:
        self._stream = stream
        self._internal_id = internal_id
        self._slots = slots

    def abort(self, child: int) -> None:
        """Stops one completion."""
        self._stream.abort(self._slots[child], self._internal_id)


def retry_delay(attempt: int, *, refused: bool) -> float:
    """Seconds before the next try: doubling, capped, with jitter so that gateways do not come back in step."""
    longest = LONGEST_RETRY_AFTER_REFUSAL_S if refused else LONGEST_RETRY_S
    delay: float = min(longest, FIRST_RETRY_S * 2.0 ** min(attempt, 10))
    return delay * random.uniform(0.5, 1.0)
