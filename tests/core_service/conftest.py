"""A scheduler with a fake runner, as a fixture: builds requests, steps, and checks what must always hold."""

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_client import BLOCK

from headrace.common.params import ModelLimits, SamplingParams
from headrace.core_service.admission import AdmissionLimits
from headrace.core_service.batch import StepResult
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine import Engine
from headrace.core_service.engine_outputs import EngineOutputs, FinishedSequence
from headrace.core_service.fakes import FakeRunner, kv_of
from headrace.core_service.grammar import GrammarBackend
from headrace.core_service.planned_step import PlannedStep
from headrace.core_service.request import Request, Sequence
from headrace.core_service.scheduler import Scheduler

VOCAB = 1000


@dataclass
class Harness:
    """A scheduler, a fake runner and everything that came out."""

    num_blocks: int = 65
    block_size: int = 16
    max_num_seqs: int = 8
    budget: int = 64
    max_model_len: int = 512
    caching: bool = True
    now: float = 0.0
    vocab: int = VOCAB
    overlap: bool = False  # plan each step before the one before it has its result
    grammars: GrammarBackend | None = None
    config: dict[str, Any] = field(default_factory=dict)  # further settings of the scheduler
    tokens: dict[Sequence, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[Sequence, FinishedSequence] = field(default_factory=dict)
    steps: list[list[tuple[Sequence, int]]] = field(default_factory=list)

    def __post_init__(self):
        self.manager = BlockManager(self.num_blocks, self.block_size, enable_prefix_caching=self.caching)
        config = SchedulerConfig(self.max_num_seqs, self.budget, **self.config)
        self.scheduler = Scheduler(self.manager, config, self.grammars)
        self.under_way: tuple[PlannedStep, StepResult] | None = None
        self.runner = FakeRunner(self.vocab, self.block_size)
        self.by_slot: dict[int, Sequence] = {}

    def request(
        self, prompt, n=1, *, arrival=None, priority=0, eos=(), deadline=None, output=(), awaits_grammar=False, **params
    ):
        """Makes a request and adds it."""
        sampling = SamplingParams(n=n, **{"max_tokens": 4, "temperature": 0.0, **params}).normalized()
        limit = self.max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        request = Request(
            internal_id=f"r{len(self.by_slot)}",
            external_id="",
            client=1,
            prompt=np.array(prompt, np.int32),
            params=sampling,
            eos_token_ids=() if sampling.ignore_eos else tuple(eos),
            length_limit=min(limit, self.max_model_len),
            priority=priority,
            arrival=self.now if arrival is None else arrival,
            received=self.now,
            deadline=deadline,
            awaits_grammar=awaits_grammar,
            time_limit=None if sampling.time_limit_s is None else self.now + sampling.time_limit_s,
        )
        for index in range(n):
            slot = len(self.by_slot)
            sequence = Sequence(request, slot=slot, index=index, seed=index, output=np.array(output, np.int32))
            self.by_slot[slot] = sequence
            request.sequences.append(sequence)
        self.scheduler.add(request)
        return request

    def step(self):
        """One turn; returns the outputs, or None if there was nothing to run and nothing to take in."""
        self.now += 1
        outputs = EngineOutputs()
        self.scheduler.expire(self.now, outputs)
        planned = self.scheduler.schedule(self.now, outputs)
        finished = self._collect()
        if planned is not None:
            self._start(planned)
        if not self.overlap:
            finished = self._collect()
        if finished is not None:
            self.scheduler.update(*finished, self.now, outputs)
        self._record(outputs)
        self.scheduler.check_integrity()
        return outputs if planned is not None or finished is not None else None

    def _start(self, planned):
        owners = [self.table.sequence(row) for row in planned.rows.tolist()]
        batch = self.scheduler.launch(planned)
        self.steps.append(list(zip(owners, np.diff(batch.query_start).tolist(), strict=True)))
        for seq, owner in enumerate(owners):
            self._check_new_tokens(batch, seq, owner)
        self.under_way = (planned, self.runner.execute(batch))
        for seq, owner in enumerate(owners):
            length = int(batch.context_lens[seq])
            assert self.runner.context(batch, seq) == kv_of(self._known_tokens(owner)[:length])

    def _collect(self) -> tuple[PlannedStep, StepResult] | None:
        finished, self.under_way = self.under_way, None
        if finished is not None:
            self.scheduler.take_tokens(*finished)
        return finished

    @property
    def table(self):
        return self.scheduler._life.table

    @property
    def has_work(self):
        return self.under_way is not None or self.scheduler.has_work

    def run(self, most=500):
        """Steps until all is done."""
        while self.has_work:
            assert most > 0, "the scheduler makes no progress"
            most -= 1
            self.step()

    def abort(self, sequence):
        """Aborts between two steps."""
        outputs = EngineOutputs()
        self.scheduler.abort(sequence, outputs)
        self._record(outputs)
        self.scheduler.check_integrity()

    def assert_idle(self):
        """Nothing is left behind."""
        self.scheduler.check_integrity()
        assert not self.has_work
        assert self.manager.num_free == self.manager.num_usable
        assert not len(self.scheduler._life.timers)
        assert not self.scheduler._life._owed
        assert not self.scheduler.num_waiting

    def _known_tokens(self, sequence):
        return [*sequence.request.prompt.tolist(), *self.table.output_of(sequence.row).tolist()]

    def _check_new_tokens(self, batch, seq, owner):
        """The new tokens of a batch are the sequence's own, at their places."""
        start, end = batch.query_start[seq], batch.query_start[seq + 1]
        known = self._known_tokens(owner)
        positions = batch.positions[start:end].tolist()
        assert batch.token_ids[start:end].tolist() == [known[p] for p in positions]

    def _record(self, outputs):
        for slot, token in zip(outputs.slots.tolist(), outputs.token_ids.tolist(), strict=True):
            sequence = self.by_slot[slot]
            assert sequence not in self.finished, "a token after the terminal row"
            self.tokens[sequence].append(token)
        for record in outputs.finished:
            assert record.sequence not in self.finished, "two terminal rows"
            self.finished[record.sequence] = record


@pytest.fixture(scope="session")
def make_harness():
    """Makes a `Harness` that takes each result in before it plans the next step."""
    return Harness


@pytest.fixture(scope="session", params=[False, True], ids=["sync", "async"])
def make_any_harness(request):
    """Makes a `Harness` of either kind, for laws that hold whatever is planned when."""
    return functools.partial(Harness, overlap=request.param)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make_engine(request):
    engines, overlap = [], request.param

    def make(runner=None, num_blocks=65, max_num_seqs=8, grammars=None, **limits):
        scheduler = Scheduler(BlockManager(num_blocks, BLOCK), SchedulerConfig(max_num_seqs, 256), grammars)
        engine = Engine(
            scheduler,
            runner or FakeRunner(VOCAB, BLOCK),
            AdmissionLimits(ModelLimits(VOCAB, 512, 20), max_kv_tokens=(num_blocks - 1) * BLOCK, **limits),
            BlobStore(1 << 20),
            grammars=grammars,
            overlap=overlap,
            check_when_idle=True,
        )
        engine.start(on_death=lambda: None)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check_integrity().result(10)
        engine.stop()
