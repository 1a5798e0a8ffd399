"""Where steps compute: on the engine's own thread, or beside it."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from headrace.core_service.batch import ScheduledBatch, StepResult

Execute = Callable[[ScheduledBatch], StepResult]


class ExecutionLane(Protocol):
    """Computes batches one after the other, in the order of their submission."""

    def submit(self, batch: ScheduledBatch) -> "Future[StepResult]":
        """The result to come; it raises what the runner raises."""
        ...


class InlineLane:
    """Computes at once: the result is there when `submit` returns."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    def submit(self, batch: ScheduledBatch) -> "Future[StepResult]":
        """Computes the batch."""
        result: Future[StepResult] = Future()
        result.set_result(self._execute(batch))
        return result


class BackgroundLane:
    """Computes on a thread of its own. A daemon: a step that hangs must not keep the process alive."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._batches: queue.SimpleQueue[tuple[ScheduledBatch, Future[StepResult]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="execute", daemon=True).start()

    def submit(self, batch: ScheduledBatch) -> "Future[StepResult]":
        """Hands the batch to the thread."""
        result: Future[StepResult] = Future()
        self._batches.put((batch, result))
        return result

    def _run(self) -> None:
        while True:
            batch, result = self._batches.get()
            try:
                result.set_result(self._execute(batch))
            except BaseException as error:
                result.set_exception(error)
