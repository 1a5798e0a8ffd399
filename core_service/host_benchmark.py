"""What the core costs besides its model: the real engine over a runner that returns at once.

Times run from the start of one execution to the start of the next, so everything between is in them: results taken in,
outputs built and encoded, the inbox, the schedule, the next batch.
"""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from headrace.common.params import ModelLimits
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits, read_request
from headrace.core_service.batch import LogprobRows, ScheduledBatch, StepResult
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine import Engine
from headrace.core_service.scheduler import Scheduler

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
BUDGET = 8192  # tokens a step
PROMPT_LENGTHS = (100, 500)  # of the requests that decode: their blocks fill up at different times
WARM_UP_STEPS = 32
STEPS = 10 * BLOCK_SIZE  # a round, in which every sequence begins ten blocks
CACHED_PROMPT_LENGTH = 2048
TIMEOUT_S = 120.0


class _InstantRunner:
    """Draws the same tokens again and again at no cost, and notes when each step began, with how many sequences.

    `full` is set once `num_steps` steps in a row had exactly `num_seqs` new tokens: nobody need be woken before.
    """

    def __init__(self, num_seqs: int, num_steps: int, num_logprobs: int | None) -> None:
        self.steps: list[tuple[float, int]] = []
        self.full = threading.Event()
        self._num_seqs = num_seqs
        self._num_steps = num_steps
        self._tokens = np.arange(1024, dtype=np.int32) + 1000
        # Of the steps that are measured, in which every sequence draws.
        self._logprobs = None if num_logprobs is None else _logprobs(num_seqs, num_logprobs + 1)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Nothing is computed."""
        self.steps.append((time.perf_counter(), batch.num_seqs))
        if len(self.steps) == self._num_steps:
            self.full.set()
        elif batch.num_tokens != self._num_seqs:
            self.steps = self.steps[-1:]
        count = len(batch.sample_index)
        return StepResult(self._tokens[:count], self._logprobs if count == self._num_seqs else None, ())


def _logprobs(num_rows: int, num_entries: int) -> LogprobRows:
    total = num_rows * num_entries
    return LogprobRows(
        rows=np.arange(num_rows, dtype=np.int32),
        offsets=np.arange(0, total + 1, num_entries, dtype=np.int32),
        token_ids=np.arange(total, dtype=np.int32) * 7 % VOCAB_SIZE,
        values=np.full(total, -1.5, np.float32),
        ranks=np.arange(total, dtype=np.int32) % num_entries + 1,
    )


class _Core:
    """An engine with one client, whose messages are encoded as for the wire."""

    def __init__(self, num_seqs: int, num_blocks: int, num_steps: int = 0, num_logprobs: int | None = None) -> None:
        self.runner = _InstantRunner(num_seqs, num_steps, num_logprobs)
        self.limits = AdmissionLimits(
            ModelLimits(VOCAB_SIZE, max_model_len=8192, max_logprobs=20), max_kv_tokens=(num_blocks - 1) * BLOCK_SIZE
        )
        scheduler = Scheduler(BlockManager(num_blocks, BLOCK_SIZE), SchedulerConfig(num_seqs, BUDGET))
        self.engine = Engine(scheduler, self.runner, self.limits, BlobStore(1))
        self._ended = 0
        self._news = threading.Condition()
        self.client = self.engine.connect(self._send)
        self.engine.start(on_death=lambda: None)

    def wait_for_end_of(self, count: int) -> None:
        """Returns when `count` requests have ended since the last time. Raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(lambda: self._ended >= count, TIMEOUT_S):
                raise TimeoutError(f"only {self._ended} of {count} requests have ended within {TIMEOUT_S:.0f} s")
            self._ended = 0

    def _send(self, message: pb.ConnectResponse) -> None:
        message.SerializeToString()
        if message.step.finished:
            with self._news:
                self._ended += len(message.step.finished)
                self._news.notify()


def steady_step_ms(num_seqs: int, rounds: int, num_logprobs: int | None = None) -> list[float]:
    """Milliseconds of a step in which `num_seqs` requests decode, the mean of each round. Raises TimeoutError."""
    num_steps = WARM_UP_STEPS + rounds * STEPS + 1
    longest = PROMPT_LENGTHS[1] + num_steps + STEPS
    with _running(_Core(num_seqs, num_seqs * (longest // BLOCK_SIZE + 1) + 1, num_steps, num_logprobs)) as core:
        rng = np.random.default_rng(0)
        messages = [
            _request(slot, rng.integers(1, VOCAB_SIZE, rng.integers(*PROMPT_LENGTHS)), longest, num_logprobs)
            for slot in range(num_seqs)
        ]
        core.engine.add(core.client, messages)
        if not core.runner.full.wait(TIMEOUT_S):
            raise TimeoutError(f"{num_seqs} requests have not decoded for {num_steps} steps within {TIMEOUT_S:.0f} s")
        times = [started for started, _ in core.runner.steps[WARM_UP_STEPS:]]
    return [1000 * (times[(i + 1) * STEPS] - times[i * STEPS]) / STEPS for i in range(rounds)]


def cached_admission_ms(num_requests: int, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds from `num_requests` messages to their common first step, and how many of them go into reading.

    Their prompts of 2,048 tokens are cached but for the last block, which must be computed. Raises TimeoutError.
    """
    blocks = CACHED_PROMPT_LENGTH // BLOCK_SIZE + 1
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCAB_SIZE, (num_requests, CACHED_PROMPT_LENGTH))
    result = []
    with _running(_Core(num_requests, num_requests * blocks + 1)) as core:
        runner = core.runner
        for i in range(rounds + 1):  # the first one fills the cache
            messages = [_request(slot, prompt, 1, None) for slot, prompt in enumerate(prompts)]
            begun = time.perf_counter()
            for message in messages:
                read_request(message, core.client, core.limits, begun)
            read = time.perf_counter() - begun
            runner.steps.clear()
            begun = time.perf_counter()
            core.engine.add(core.client, messages)
            core.wait_for_end_of(num_requests)
            started, num_seqs = runner.steps[0]
            if i:
                if num_seqs != num_requests:
                    raise RuntimeError(f"only {num_seqs} of {num_requests} cached prompts started in one step")
                result.append((1000 * (started - begun), 1000 * read))
    return result


def _request(slot: int, prompt: np.ndarray, max_tokens: int, num_logprobs: int | None) -> pb.EngineCoreRequest:
    message = pb.EngineCoreRequest(internal_id=str(slot), prompt_token_ids=prompt.tolist(), eos_token_ids=[0])
    message.children.add(slot=slot, seed=slot)
    message.sampling.max_tokens = max_tokens
    if num_logprobs is not None:
        message.sampling.logprobs = num_logprobs
    return pb.EngineCoreRequest.FromString(message.SerializeToString())  # as it comes from the wire


@contextmanager
def _running(core: _Core) -> Iterator[_Core]:
    # As the core process does once it has loaded: what is there now need not be looked at again and again.
    gc.collect()
    gc.freeze()
    try:
        yield core
    finally:
        core.engine.disconnect(core.client)
        core.engine.stop()
        gc.unfreeze()
