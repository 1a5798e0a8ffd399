"""The real engine, scheduler and model runner in this process, and exactly what each request got."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.common.params import ModelLimits
from headrace.common.params_wire import duration
from headrace.common.v1.params_pb2 import SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine import Engine
from headrace.core_service.model_runner import ModelRunner, build_runner
from headrace.core_service.scheduler import Scheduler

BLOCK_SIZE = 16
PATIENCE_S = 120


@dataclass(frozen=True)
class Asked:
    """A request: a made-up prompt, and how it is drawn."""

    prompt_seed: int
    prompt_len: int
    max_tokens: int
    temperature: float = 0.0
    seed: int = 7

    def message(self, slot: int, vocab_size: int) -> pb.EngineCoreRequest:
        prompt = np.random.default_rng(self.prompt_seed).integers(3, vocab_size, self.prompt_len)
        message = pb.EngineCoreRequest(
            internal_id=f"r{slot}",
            prompt_token_ids=prompt.tolist(),
            sampling=SamplingParams(
                temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, logprobs=2, ignore_eos=True
            ),
            children=[pb.Child(slot=slot)],
        )
        message.age.CopyFrom(duration(0.0))
        return message


@dataclass
class Got:
    """What a request got: tokens and, for each, ids and the bits of their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], bytes]] = field(default_factory=list)
    finished: pb.Finished | None = None

    @property
    def bits(self) -> tuple[list[int], list[tuple[list[int], bytes]]]:
        assert self.finished is not None
        assert self.finished.code == 0, self.finished
        assert len(self.token_ids) == len(self.logprobs) > 0
        return self.token_ids, self.logprobs


@dataclass(frozen=True)
class Settings:
    """How a core serves."""

    num_blocks: int = 600
    max_num_seqs: int = 64
    budget: int = 2048
    chunk: int = 0  # most prompt tokens of a sequence in one step; 0: the budget
    caching: bool = False
    overlap: bool = False
    threads: int = 2


class ModelCore:
    """An engine over a runner; several may follow each other over one, with whatever they left in its cache."""

    def __init__(self, runner: ModelRunner, settings: Settings) -> None:
        assert settings.num_blocks <= runner.num_blocks
        self._vocab_size = runner.spec.vocab_size
        blocks = BlockManager(settings.num_blocks, BLOCK_SIZE, enable_prefix_caching=settings.caching)
        config = SchedulerConfig(settings.max_num_seqs, settings.budget, long_prefill_token_threshold=settings.chunk)
        limits = AdmissionLimits(ModelLimits(self._vocab_size, 4096, 20), (settings.num_blocks - 1) * BLOCK_SIZE)
        self.engine = Engine(Scheduler(blocks, config), runner, limits, BlobStore(1 << 20), overlap=settings.overlap)
        self._news = threading.Condition()
        self._got: list[Got] = []
        self._client = self.engine.connect(self._take)

    def run(self, asked: Sequence[Asked]) -> list[Got]:
        """Adds them together; waits for all."""
        first = len(self._got)
        self._got += [Got() for _ in asked]
        self.engine.add(self._client, [one.message(first + index, self._vocab_size) for index, one in enumerate(asked)])
        mine = self._got[first:]
        with self._news:
            done = self._news.wait_for(
                lambda: not self.engine.alive or all(got.finished is not None for got in mine), PATIENCE_S
            )
        assert done
        assert self.engine.alive
        return mine

    def _take(self, response: pb.ConnectResponse) -> None:
        message = response.step
        with self._news:
            for slot, token in zip(message.slots, message.token_ids, strict=True):
                self._got[slot].token_ids.append(token)
            columns = message.logprobs
            for row, slot in enumerate(columns.slots):
                entries = slice(columns.offsets[row], columns.offsets[row + 1])
                values = np.array(columns.values[entries], np.float32).tobytes()
                self._got[slot].logprobs.append((list(columns.token_ids[entries]), values))
            for record in message.finished:
                self._got[record.slot].finished = record
            self._news.notify_all()


@contextmanager
def running(runner: ModelRunner, settings: Settings) -> Iterator[ModelCore]:
    """A core that is stopped at the end."""
    torch.set_num_threads(settings.threads)  # before its thread starts
    core = ModelCore(runner, settings)
    core.engine.start(on_death=lambda: None)
    try:
        yield core
    finally:
        core.engine.stop()
        torch.set_num_threads(1)


def serve(runner: ModelRunner, asked: Sequence[Asked], settings: Settings) -> list[Got]:
    """One batch of requests on a core of their own."""
    with running(runner, settings) as core:
        return core.run(asked)


def serve_in_new_process(path: Path, dtype: str, asked: Sequence[Asked]) -> list[object]:
    """Called in a process of its own: loads the model, serves each request alone, returns the bits."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    runner = build_runner(path, kv_cache_memory=64 << 20, dtype=dtype, block_size=BLOCK_SIZE)
    settings = Settings(num_blocks=60, threads=1)
    return [serve(runner, [one], settings)[0].bits for one in asked]
