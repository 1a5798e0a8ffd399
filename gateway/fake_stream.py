"""How a fake core (`headrace.gateway.fakes`) serves one gateway's stream, step by step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from headrace.common.errors import Unavailable
from headrace.common.params_wire import duration
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb

if TYPE_CHECKING:
    from headrace.gateway.fakes import FakeCore

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class FakeBehaviour:
    """What a fake core does; may be changed while it runs."""

    next_token: Callable[[int, int], int]  # (last token id, seed) to the next id
    script: Sequence[int] | None = None  # if set, these tokens, whatever the prompt; after its end the last one again
    step_pause_s: float = 0.0
    tokens_per_step: int = 1
    heartbeat_s: float = 1.0
    healthy: bool = True
    loading: bool = False  # only the tokenizer can be had
    silent: bool = False  # neither steps nor heartbeats
    logprobs_by_blob: bool = False
    refuse_with: pb.Finished | None = None  # terminal row for every new child
    fail_after: tuple[int, pb.Finished] | None = None  # terminal row once a completion has so many tokens


@dataclass
class FakeCompletion:
    """A completion in progress."""

    request: pb.EngineCoreRequest
    child: pb.Child
    last_token: int
    output: list[int] = field(default_factory=list)


class FakeStream:
    """One gateway's stream."""

    def __init__(self, core: "FakeCore", context: Context) -> None:
        self._core = core
        self._context = context
        self._outbox: asyncio.Queue[pb.ConnectResponse] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._step = 0
        self.live: dict[int, FakeCompletion] = {}
        self.broken = asyncio.Event()

    def send(self, message: pb.ConnectResponse) -> None:
        """Queues a message."""
        self._outbox.put_nowait(message)
        self._wake.set()

    async def read(self, messages: AsyncIterator[pb.ConnectRequest]) -> None:
        """Takes requests and aborts; the stream is broken when the gateway ends it."""
        async for message in messages:
            for request in message.add.requests:
                self._add(request)
            for slot, internal_id in zip(message.abort.slots, message.abort.internal_ids, strict=True):
                self._abort(slot, internal_id)
            self._wake.set()
        self.broken.set()

    async def write(self) -> None:
        """Steps while there is work, heartbeats while there is none."""
        while not self.broken.is_set():
            while not self._outbox.empty():
                await self._context.write(self._outbox.get_nowait())
            behaviour = self._core.behaviour
            if behaviour.silent or not self.live:
                await self._wait(behaviour.heartbeat_s)
                if self._outbox.empty() and not self.live and not behaviour.silent:
                    heartbeat = pb.Heartbeat(stats=self._core.stats, healthy=behaviour.healthy)
                    self.send(pb.ConnectResponse(heartbeat=heartbeat))
                continue
            await self._context.write(pb.ConnectResponse(step=self._next_step()))
            await asyncio.sleep(behaviour.step_pause_s)
        raise Unavailable("the fake core broke the stream")

    async def _wait(self, timeout_s: float) -> None:
        self._wake.clear()
        broken, wake = asyncio.ensure_future(self.broken.wait()), asyncio.ensure_future(self._wake.wait())
        await asyncio.wait({broken, wake}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        wake.cancel()

    def _add(self, request: pb.EngineCoreRequest) -> None:
        children = request.children
        if request.body_digest:
            slots = [child.slot for child in children]
            request = pb.EngineCoreRequest.FromString(self._core.blobs[request.body_digest])
            for child, slot in zip(request.children, slots, strict=True):
                child.slot = slot
        self._core.requests.append(request)
        for child in request.children:
            if child.slot in self.live:
                self._core.breaches.append(f"slot {child.slot} was in use")
            self.live[child.slot] = FakeCompletion(request, child, request.prompt_token_ids[-1])
            refusal = self._core.behaviour.refuse_with
            if refusal is not None or self._core.draining:
                self._finish(child.slot, refusal or _error(14, "the core is draining", retryable=True))

    def _abort(self, slot: int, internal_id: str) -> None:
        self._core.aborted.append(internal_id)
        completion = self.live.get(slot)
        if completion is not None and completion.request.internal_id == internal_id:
            self._finish(slot, pb.Finished(reason=params_pb2.FINISH_REASON_ABORT, code=1, message="aborted"))

    def _finish(self, slot: int, row: pb.Finished) -> None:
        step = pb.StepOutputs(step=self._step, stats=self._core.stats)
        step.finished.append(self._terminal(slot, row))
        self.send(pb.ConnectResponse(step=step))

    def _terminal(self, slot: int, row: pb.Finished) -> pb.Finished:
        completion = self.live.pop(slot)
        result = pb.Finished()
        result.CopyFrom(row)
        result.slot = slot
        result.cached_tokens = len(completion.request.prompt_token_ids) // 2
        result.timing.decode.CopyFrom(duration(0.001 * len(completion.output)))
        return result

    def _next_step(self) -> pb.StepOutputs:
        self._step += 1
        step = pb.StepOutputs(step=self._step)
        for slot, completion in list(self.live.items()):
            if not completion.output and completion.request.sampling.HasField("prompt_logprobs"):
                self._add_prompt_logprobs(step.prompt_logprobs, slot, completion)
            self._advance(step, slot, completion)
        if self._core.behaviour.tokens_per_step == 1:
            step.ClearField("counts")
        if self._core.behaviour.logprobs_by_blob:
            for name in ("logprobs", "prompt_logprobs"):
                if step.HasField(name):
                    digest = self._core.put(getattr(step, name).SerializeToString())
                    getattr(step, name).CopyFrom(pb.LogprobColumns(blob_digests=[digest]))
        step.stats.CopyFrom(self._core.stats)
        return step

    def _advance(self, step: pb.StepOutputs, slot: int, completion: FakeCompletion) -> None:
        """Adds the completion's tokens of this step and, if it ends, its terminal row."""
        behaviour, sampling = self._core.behaviour, completion.request.sampling
        count, finished = 0, None
        while finished is None and count < behaviour.tokens_per_step:
            token = self._draw(completion)
            completion.output.append(token)
            completion.last_token = token
            count += 1
            step.token_ids.append(token)
            if sampling.HasField("logprobs"):
                _add_row(step.logprobs, slot, len(completion.output) - 1, token, sampling.logprobs)
            finished = self._ending(completion)
        step.slots.append(slot)
        step.counts.append(count)
        if finished is not None:
            step.finished.append(self._terminal(slot, finished))

    def _draw(self, completion: FakeCompletion) -> int:
        behaviour = self._core.behaviour
        if behaviour.script is not None:
            return behaviour.script[min(len(completion.output), len(behaviour.script) - 1)]
        return behaviour.next_token(completion.last_token, completion.child.seed)

    def _ending(self, completion: FakeCompletion) -> pb.Finished | None:
        request, sampling, output = completion.request, completion.request.sampling, completion.output
        fail_after = self._core.behaviour.fail_after
        if fail_after is not None and len(output) >= fail_after[0]:
            return fail_after[1]
        if output[-1] in request.eos_token_ids and not sampling.ignore_eos:
            row = pb.Finished(reason=params_pb2.FINISH_REASON_STOP)
            if output[-1] != request.eos_token_ids[0]:
                row.stop_token_id = output[-1]
            return row
        if output[-1] in sampling.stop_token_ids:
            return pb.Finished(reason=params_pb2.FINISH_REASON_STOP, stop_token_id=output[-1])
        room = self._core.info.max_model_len - len(request.prompt_token_ids)
        most = min(room, sampling.max_tokens) if sampling.WhichOneof("limit") == "max_tokens" else room
        return pb.Finished(reason=params_pb2.FINISH_REASON_LENGTH) if len(output) >= most else None

    def _add_prompt_logprobs(self, columns: pb.LogprobColumns, slot: int, completion: FakeCompletion) -> None:
        sampling = completion.request.sampling
        if slot == completion.request.children[0].slot:
            for position, token in enumerate(completion.request.prompt_token_ids):
                if position >= max(sampling.prompt_logprob_start, 1):
                    _add_row(columns, slot, position, token, sampling.prompt_logprobs)


def _add_row(columns: pb.LogprobColumns, slot: int, position: int, token: int, num_most_likely: int) -> None:
    """The token with log-probability -1 and rank 2, then ids 0, 1, 2, ... with -0.5, -1.5, ..."""
    if not columns.offsets:
        columns.offsets.append(0)
    columns.slots.append(slot)
    columns.positions.append(position)
    columns.token_ids.extend([token, *range(num_most_likely)])
    columns.values.extend([-1.0, *(-0.5 - i for i in range(num_most_likely))])
    columns.ranks.extend([2, *(i + 1 for i in range(num_most_likely))])
    columns.offsets.append(len(columns.token_ids))


def _error(code: int, message: str, *, retryable: bool) -> pb.Finished:
    return pb.Finished(reason=params_pb2.FINISH_REASON_ERROR, code=code, message=message, retryable=retryable)
