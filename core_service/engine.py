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

from headrace.common.errors import EngineDeadError, InternalError, RequestError, Unimplemented
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.params_wire import duration
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits, check_queue, read_request, refusal
from headrace.core_service.batch import ScheduledBatch, StepResult
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.execution_lane import BackgroundLane, InlineLane
from headrace.core_service.grammar import CompiledGrammar, GrammarBackend
from headrace.core_service.planned_step import PlannedStep
from headrace.core_service.prefix_cache import PrefixListener
from headrace.core_service.progress import ProgressWatch
from headrace.core_service.request import ClientId, Request, Sequence
from headrace.core_service.scheduler import Scheduler
from headrace.core_service.step_messages import step_messages

STOP_TIMEOUT_S = 10.0
# How long to wait for news when there is work that cannot run. It cannot happen; if it does, it must not cost a core.
STALLED_WAIT_S = 0.05
# A lock cannot wait for centuries, as a request's deadline can.
LONGEST_WAIT_S = 3600.0

Sink = Callable[[pb.ConnectResponse], None]  # gets what its stream is to carry: messages with `step` set

log = structlog.get_logger(__name__)


class Runner(Protocol):
    """What the engine needs of a model runner."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Computes a batch and draws its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    step: PlannedStep
    result: "Future[StepResult]"


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
        *,
        grammars: GrammarBackend | None = None,
        overlap: bool = False,
        check_when_idle: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `overlap` the next step is planned while one computes. `grammars` is the scheduler's own.

        With `check_when_idle` every block and row is checked whenever there is nothing to do, at a cost that grows with
        the pool: for tests and for whoever hunts a fault.
        """
        self._scheduler = scheduler
        self._lane = BackgroundLane(runner.execute) if overlap else InlineLane(runner.execute)
        self._overlap = overlap
        self._check_when_idle = check_when_idle
        self._under_way: _StepUnderWay | None = None
        self._grammars = grammars
        self._compiling: dict[Request, Future[CompiledGrammar]] = {}
        self._calls: set[Future[Any]] = set()
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
        if self._grammars is not None:
            self._grammars.close()
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

    def watch_prefix_cache(self, listener: PrefixListener | None) -> "Future[None]":
        """Tells `listener` what is cached and each change from then on, on the engine's thread; None ends that."""
        return self._call(lambda: self._scheduler.blocks.watch(listener))

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
        for future in list(self._calls):
            if not future.done():
                future.set_exception(EngineDeadError("the engine has ended"))

    def _step(self) -> bool:
        """One turn of the loop; False when it is time to stop."""
        outputs = EngineOutputs()
        if not self._take_inbox(outputs):
            return False
        now = self._clock()
        self._scheduler.expire(now, outputs)
        planned = self._scheduler.schedule(now, outputs)
        finished = self._collect()
        if planned is not None:
            self._start(planned)
        if not self._overlap:
            finished = self._collect()
        if finished is not None:
            self._scheduler.update(*finished, self._clock(), outputs)
        self._stalled = planned is None and finished is None and self._scheduler.has_work
        self._progress.set_pending(self._has_work)
        self._publish(outputs)
        return True

    @property
    def _has_work(self) -> bool:
        return self._under_way is not None or self._scheduler.has_work

    def _start(self, planned: PlannedStep) -> None:
        batch = self._scheduler.launch(planned)
        self._progress.step_started(batch.num_tokens)
        self._under_way = _StepUnderWay(planned, self._lane.submit(batch))

    def _collect(self) -> tuple[PlannedStep, StepResult] | None:
        """Waits for the step under way, if there is one, and lets the next one read its tokens."""
        if self._under_way is None:
            return None
        step, result = self._under_way.step, self._under_way.result.result()
        self._under_way = None
        self._scheduler.take_tokens(step, result)
        self._progress.step_finished()
        return step, result

    def _take_inbox(self, outputs: EngineOutputs) -> bool:
        """Runs all commands that are there, waiting for one if there is nothing else to do; False to stop."""
        block = not self._has_work or self._stalled
        if self._check_when_idle and not self._has_work:
            self._scheduler.check_integrity()
        while True:
            try:
                command = self._inbox.get(block, self._longest_wait()) if block else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command(outputs)
            block = False

    def _longest_wait(self) -> float | None:
        """How long to wait for news, in seconds; None: for ever. Requests that wait for a grammar can expire, too."""
        expiry = self._scheduler.next_expiry
        until_expiry = None if expiry is None else min(max(expiry - self._clock(), 0.0), LONGEST_WAIT_S)
        if not self._stalled:
            return until_expiry
        return STALLED_WAIT_S if until_expiry is None else min(until_expiry, STALLED_WAIT_S)

    def _publish(self, outputs: EngineOutputs) -> None:
        self._stats = self._current_stats()
        for client, message in step_messages(outputs, self._stats, self._blobs):
            self._send(client, message)
        for record in outputs.finished:
            state = self._clients.get(record.sequence.request.client)
            if state is not None:
                state.sequences.pop(record.sequence.slot, None)
            if self._compiling and not record.sequence.request.num_unfinished:
                compiling = self._compiling.pop(record.sequence.request, None)
                if compiling is not None:
                    compiling.cancel()

    def _send(self, client: ClientId, message: pb.ConnectResponse) -> None:
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
                if request.params.structured_outputs is not None and self._grammars is None:
                    raise Unimplemented("this core compiles no grammars", reason="FEATURE_NOT_SUPPORTED")
                if not message.resumes:
                    check_queue(self._scheduler.num_waiting, self._scheduler.num_waiting_tokens, request, self._limits)
            except RequestError as error:
                self._refuse(client, message, error)
                continue
            except Exception as error:  # a fault of ours in reading it: that request's end, not the engine's
                log.exception("request could not be read", internal_id=message.internal_id, exc_info=error)
                self._refuse(client, message, InternalError("the core could not read the request; its log says why"))
                continue
            request.awaits_grammar = request.params.structured_outputs is not None
            self._scheduler.add(request)
            state.sequences.update((sequence.slot, sequence) for sequence in request.sequences)
            if request.params.structured_outputs is not None:
                self._compile_grammar(request, request.params.structured_outputs)
        self._progress.set_pending(self._has_work)

    def _compile_grammar(self, request: Request, constraint: StructuredOutputsParams) -> None:
        assert self._grammars is not None, "refused before"
        compiled = self._grammars.compile(constraint, request.grammar_after, request.eos_token_ids)
        self._compiling[request] = compiled
        # On a thread of the compiler; a dead engine needs no news.
        compiled.add_done_callback(lambda done: self._inbox.put(lambda out: self._take_grammar(request, done, out)))

    def _take_grammar(self, request: Request, compiled: "Future[CompiledGrammar]", outputs: EngineOutputs) -> None:
        self._compiling.pop(request, None)
        if compiled.cancelled():  # the request has ended
            return
        error = compiled.exception()
        if error is None:
            self._scheduler.grammar_ready(request, compiled.result(), outputs)
        elif isinstance(error, RequestError):
            self._scheduler.grammar_failed(request, error, outputs)
        else:
            log.error("grammar compiler failed", internal_id=request.internal_id, exc_info=error)
            self._scheduler.grammar_failed(
                request, InternalError("the core could not compile the grammar; its log says why"), outputs
            )

    def _refuse(self, client: ClientId, message: pb.EngineCoreRequest, error: RequestError) -> None:
        for response in refusal(message, error):
            self._send(client, response)

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
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def command(_: EngineOutputs) -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(function())
            except RuntimeError as error:
                future.set_exception(error)

        self._put(command)
        return future
