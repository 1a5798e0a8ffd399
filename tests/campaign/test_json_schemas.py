"""JSON schemas with a real model at temperature 1: outputs end, parse and validate, also when they are preempted."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from bounded_schemas import SCHEMAS
from grammar_walks import build_backend, start
from json_schema_checker import faults

from headrace.common.demo_model import fetch_demo_model
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.params import SamplingParams
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.model_runner import build_runner
from headrace.core_service.request import Request, Sequence, SequenceState
from headrace.core_service.scheduler import Scheduler
from headrace.core_service.structured.backend import build_grammar_backend

pytestmark = [pytest.mark.campaign, pytest.mark.model, pytest.mark.timeout(3600)]

BLOCK, MAX_TOKENS, AT_ONCE = 8, 320, 20
SHORT, LONG = 40, 200  # runs
ROOMY, TIGHT = 1024, 30  # blocks; the latter are enough for one request, and too few for those that run at once
# Every second request is preempted in any case.
PROMPT = "<|im_start|>user\n{}. Answer in JSON.<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Run:
    """One request and what came of it."""

    schema: dict[str, Any]
    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    reason: int | None = None


class World:
    """The demo model, its grammars, and a scheduler with as many blocks as a test gives it."""

    def __init__(self):
        path = fetch_demo_model()
        files = load_tokenizer_files(path)
        self.tokenizer = files.build_tokenizer()
        self.runner = build_runner(path, kv_cache_memory=ROOMY * BLOCK * 92_160, block_size=BLOCK, max_model_len=2048)
        self.eos = files.eos_token_ids
        self.backend = build_grammar_backend(files, self.runner.spec.vocab_size, self.eos)

    def run(self, names, num_blocks, first_seed):
        """Serves one request for each of the schemas; all of them are started at once."""
        blocks = BlockManager(num_blocks, BLOCK)
        scheduler = Scheduler(blocks, SchedulerConfig(AT_ONCE, 2048), self.backend)
        runs, outputs = {}, EngineOutputs()
        for slot, name in enumerate(names):
            runs[slot] = self._add(scheduler, slot, name, first_seed + slot, outputs)
        now = 0.0
        while scheduler.has_work:
            now += 1.0
            outputs = EngineOutputs()
            step = scheduler.schedule(now, outputs)
            if step is not None:
                result = self.runner.execute(scheduler.launch(step))
                scheduler.take_tokens(step, result)
                scheduler.update(step, result, now, outputs)
            for slot, token in zip(outputs.slots.tolist(), outputs.token_ids.tolist(), strict=True):
                runs[slot].tokens.append(token)
            for record in outputs.finished:
                runs[record.sequence.slot].reason = record.reason
            for slot in range(1, len(runs), 2):
                self._push_out_once(scheduler, runs[slot])
        scheduler.check_integrity()
        assert blocks.num_free == blocks.num_usable
        return list(runs.values())

    def _push_out_once(self, scheduler, run):
        """Preempts a request that nothing else has preempted, early in its output or later, as its place says."""
        sequence = run.sequence
        early = len(run.tokens) <= sequence.slot % 8
        if sequence.state is SequenceState.RUNNING and run.tokens and not sequence.preemptions and not early:
            scheduler._life.preempt(sequence)

    def _add(self, scheduler, slot, name, seed, outputs):
        schema = SCHEMAS[name]
        text = PROMPT.format(name)
        prompt = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        constraint = StructuredOutputsParams(json=json.dumps(schema))
        request = Request(
            internal_id=f"{slot}",
            external_id="",
            client=1,
            prompt=prompt,
            params=SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=constraint),
            eos_token_ids=self.eos,
            length_limit=len(prompt) + MAX_TOKENS,
            priority=0,
            arrival=0.0,
            received=0.0,
            awaits_grammar=True,
        )
        request.sequences = [Sequence(request, slot=slot, index=0, seed=seed)]
        scheduler.add(request)
        scheduler.grammar_ready(request, self.backend.compile(constraint, (), self.eos).result(60), outputs)
        return Run(schema, request.sequences[0])


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.backend.close()


@pytest.fixture(scope="module")
def by_bytes():
    """The same grammars over single bytes, to check texts with whatever tokens made them."""
    backend = build_backend()
    yield backend
    backend.close()


def test_outputs_of_json_schemas_end_parse_and_validate_also_when_preempted(world, by_bytes, scale):
    wanted = SHORT if scale == 1 else LONG
    names, preempted = list(SCHEMAS), 0
    runs: list[Run] = []
    while len(runs) < wanted:
        tight = len(runs) // AT_ONCE % 2 == 1
        chosen = [names[(len(runs) + i) % len(names)] for i in range(min(AT_ONCE, wanted - len(runs)))]
        done = world.run(chosen, TIGHT if tight else ROOMY, first_seed=len(runs))
        preempted += sum(run.sequence.preemptions > 0 for run in done)
        runs += done
    ended = [run for run in runs if run.reason == FinishReason.FINISH_REASON_STOP]
    cut = [run for run in runs if run.reason == FinishReason.FINISH_REASON_LENGTH]
    print(f"{len(runs)} runs, {len(ended)} ended, {preempted} preempted, {sum(len(run.tokens) for run in runs)} tokens")
    assert len(ended) + len(cut) == len(runs)
    for run in ended:
        assert faults(json.loads(world.tokenizer.decode(run.tokens)), run.schema) == []
    for run in cut:
        assert_prefix(world.tokenizer.decode(run.tokens), run.schema, by_bytes)
    assert len(ended) >= 0.95 * len(runs)
    assert preempted >= len(runs) / 2


def assert_prefix(text, schema, by_bytes):
    """The text can go on to a value of the schema."""
    grammar = start(by_bytes, StructuredOutputsParams(json=json.dumps(schema)))
    for position, byte in enumerate(text.rstrip("\ufffd").encode()):
        assert grammar.accept(byte), f"byte {position} of {text!r} does not fit"
