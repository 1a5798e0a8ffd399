"""The engine: one thread that turns requests into step outputs.

    inbox → schedule → execute → update → outbox

Everything that the scheduler owns is touched by this thread alone. Other threads talk to it through `add`, `abort`,
`connect`, `disconnect` and `call`, which only put commands into the inbox; it answers through each client's sink.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from google.rpc import code_pb2

from headrace.common.errors import EngineDeadError, InternalError, RequestError
from headrace.common.params_wire import duration
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits, check_queue, read_request, refusal
from headrace.core_service.batch import ScheduledBatch, StepResult
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.progress import ProgressWatch
from headrace.core_service.request import ClientId, Sequence
from headrace.core_service.scheduler import Scheduler
from headrace.core_service.step_messages import step_messages

STOP_TIMEOUT_S = 10.0
# How long to wait for news when there is work that cannot run. It cannot happen; if it does, it must not cost a core.
STALLED_WAIT_S = 0.05

Sink = Callable[[pb.StepOutputs], None]

log = structlog.get_logger(__name__)


class Runner(Protocol):
    """What the engine needs of a model runner."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Computes a batch and draws its tokens."""
        ...


@dataclass(slots=True)
class _Client:
    """A gateway's stream."""

    sink: Sink
    sequences: dict[int, Sequence] = field(default_factory=dict)  # live ones, by slot


class Engine:
    """Owns the scheduler and the runner; start it once, stop it once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: AdmissionLimits,
        blobs: BlobStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._limits = limits
        self._blobs = blobs
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[EngineOutputs], None] | None] = queue.SimpleQueue()
        self._clients: dict[ClientId, _Client] = {}
        self._next_client = 1
        self._refusing: RequestError | None = None
        self._stats = pb.SchedulerStats(free_blocks=scheduler.blocks.num_free)
        self._progress = ProgressWatch(clock)
        self._on_death: Callable[[], None] = lambda: None
        self._dead = False
        self._stalled = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def start(self, on_death: Callable[[], None]) -> None:
        """Starts the thread; `on_death` is called on it, once, if it ends on a fault."""
        self._on_death = on_death
        self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ends the thread after the step under way; False if that step does not end in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """False once the thread has ended on a fault."""
        return not self._dead

    @property
    def healthy(self) -> bool:
        """False if the engine is dead, or work is pending and no step has finished for too long."""
        return not self._dead and self._progress.healthy

    @property
    def num_live(self) -> int:
        """Sequences that have not had their terminal row."""
        return sum(len(state.sequences) for state in list(self._clients.values()))

    def load(self) -> pb.SchedulerStats:
        """State after the last step; never waits for the engine."""
        stats = pb.SchedulerStats()
        stats.CopyFrom(self._stats)
        pending = self._progress.oldest_pending_s
        if pending is not None:
            stats.oldest_pending.CopyFrom(duration(pending))
        return stats

    def connect(self, sink: Sink) -> ClientId:
        """A new client; `sink` is called on the engine's thread and must return at once."""
        client = self._next_client
        self._next_client += 1
        self._put(lambda _: self._clients.__setitem__(client, _Client(sink)))
        return client

    def disconnect(self, client: ClientId) -> None:
        """Aborts all requests of a client that went away."""
        self._put(lambda outputs: self._disconnect(client, outputs))

    def add(self, client: ClientId, messages: list[pb.EngineCoreRequest]) -> None:
        """New requests; each one ends with a terminal row per child, also if it is refused."""
        self._put(lambda _: self._add(client, messages))

    def abort(self, client: ClientId, slots: list[int], internal_ids: list[str]) -> None:
        """Ends requests; what is unknown or ended is ignored."""
        self._put(lambda outputs: self._abort(client, slots, internal_ids, outputs))

    def refuse_new(self, error: RequestError) -> None:
        """From now on every new request is refused with `error`."""
        self._put(lambda _: setattr(self, "_refusing", error))

    def abort_all(self, message: str) -> None:
        """Ends every live request as cut by the core itself: ABORT with UNAVAILABLE."""
        self._put(lambda outputs: self._abort_all(message, outputs))

    def reset_prefix_cache(self) -> "Future[int]":
        """Forgets cached prefixes; the future has the number of blocks."""
        return self._call(self._scheduler.reset_prefix_cache)

    def check_integrity(self) -> "Future[None]":
        """Checks every block and row between two steps; the future raises RuntimeError if something is wrong."""
        return self._call(self._scheduler.check_integrity)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # whatever the runner or a bug raises: the engine is dead, and says so
            log.exception("engine died", exc_info=error)
            self._dead = True
            self._on_death()

    def _step(self) -> bool:
        """One turn of the loop; False when it is time to stop."""
        outputs = EngineOutputs()
        if not self._take_inbox(outputs):
            return False
        now = self._clock()
        self._scheduler.expire(now, outputs)
        step = self._scheduler.schedule(now, outputs)
        self._stalled = step is None and self._scheduler.has_work
        if step is not None:
            self._progress.step_started(step.batch.num_tokens)
            result = self._runner.execute(step.batch)
            self._scheduler.update(step, result, self._clock(), outputs)
            self._progress.step_finished()
        self._progress.set_pending(self._scheduler.has_work)
        self._publish(outputs)
        return True

    def _take_inbox(self, outputs: EngineOutputs) -> bool:
        """Runs all commands that are there, waiting for one if there is nothing else to do; False to stop."""
        block = not self._scheduler.has_work or self._stalled
        while True:
            try:
                command = self._inbox.get(block, STALLED_WAIT_S if self._stalled else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(outputs)
            block = False

    def _publish(self, outputs: EngineOutputs) -> None:
        self._stats = self._current_stats()
        for client, message in step_messages(outputs, self._stats, self._blobs):
            self._send(client, message)
        for record in outputs.finished:
            state = self._clients.get(record.sequence.request.client)
            if state is not None:
                state.sequences.pop(record.sequence.slot, None)

    def _send(self, client: ClientId, message: pb.StepOutputs) -> None:
        state = self._clients.get(client)
        if state is not None:  # else it went away with its requests
            state.sink(message)

    def _add(self, client: ClientId, messages: list[pb.EngineCoreRequest]) -> None:
        state = self._clients.get(client)
        if state is None:
            return
        for message in messages:
            try:
                if self._refusing is not None:
                    raise self._refusing
                request = read_request(message, client, self._limits, self._clock())
                if not message.resumes:
                    check_queue(self._scheduler.num_waiting, self._scheduler.num_waiting_tokens, request, self._limits)
            except RequestError as error:
                self._refuse(client, message, error)
                continue
            except Exception as error:  # a fault of ours in reading it: that request's end, not the engine's
                log.exception("request could not be read", internal_id=message.internal_id, exc_info=error)
                self._refuse(client, message, InternalError("the core could not read the request; its log says why"))
                continue
            self._scheduler.add(request)
            state.sequences.update((sequence.slot, sequence) for sequence in request.sequences)
        self._progress.set_pending(self._scheduler.has_work)

    def _refuse(self, client: ClientId, message: pb.EngineCoreRequest, error: RequestError) -> None:
        for outputs in refusal(message, error):
            self._send(client, outputs)

    def _abort(self, client: ClientId, slots: list[int], internal_ids: list[str], outputs: EngineOutputs) -> None:
        state = self._clients.get(client)
        for slot, internal_id in zip(slots, internal_ids, strict=True) if state else ():
            sequence = state.sequences.get(slot) if state else None
            if sequence is not None and sequence.request.internal_id == internal_id:
                self._scheduler.abort(sequence, outputs)

    def _disconnect(self, client: ClientId, outputs: EngineOutputs) -> None:
        state = self._clients.pop(client, None)
        for sequence in state.sequences.values() if state else ():
            self._scheduler.abort(sequence, outputs)

    def _abort_all(self, message: str, outputs: EngineOutputs) -> None:
        for state in self._clients.values():
            for sequence in state.sequences.values():
                self._scheduler.abort(sequence, outputs, code=code_pb2.UNAVAILABLE, message=message)

    def _current_stats(self) -> pb.SchedulerStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        free, usable = scheduler.blocks.num_free, scheduler.blocks.num_usable
        return pb.SchedulerStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            kv_usage=1 - free / usable,
            free_blocks=free,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            output_tokens=counters.output_tokens,
            steps=counters.steps,
            preemptions=counters.preemptions,
        )

    # -- commands ------------------------------------------------------------------------------------------------------

    def _put(self, command: Callable[[EngineOutputs], None]) -> None:
        if self._dead:
            raise EngineDeadError("the engine has died; the log says why")
        self._inbox.put(command)

    def _call(self, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def command(_: EngineOutputs) -> None:
            try:
                future.set_result(function())
            except RuntimeError as error:
                future.set_exception(error)

        self._put(command)
        return future
