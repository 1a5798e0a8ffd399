"""Thousands of requests through a scheduler with a tiny pool: each ends exactly once, and memory stays flat."""

import gc
import random
import tracemalloc

import numpy as np
import pytest

from headrace.common.block_hashes import BlockKeys
from headrace.common.params import SamplingParams
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.fakes import FakeRunner
from headrace.core_service.request import Request, Sequence
from headrace.core_service.scheduler import Scheduler

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

VOCAB, BLOCK, MAX_LEN = 1000, 4, 40


def make_request(rng, now, slot):
    prompt = np.arange(rng.choice([0, 100, 200]), 1000, dtype=np.int32)[: rng.randint(1, 20)]
    max_tokens = rng.randint(1, 20)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=rng.choice([1, 1, 1, 2, 4]))
    request = Request(
        internal_id=str(slot),
        external_id="",
        client=1,
        prompt=prompt,
        params=params,
        eos_token_ids=(),
        length_limit=min(len(prompt) + max_tokens, MAX_LEN),
        priority=rng.randint(0, 3),
        arrival=now - rng.choice([0, 0, 50]),
        received=now,
        deadline=now + rng.randint(1, 60) if rng.random() < 0.2 else None,
        block_keys=BlockKeys.of_first_block(cache_salt=rng.choice(["", "", "tenant"])),
    )
    request.sequences = [Sequence(request, slot=slot + i, index=i, seed=i) for i in range(params.n)]
    return request


def bytes_of_the_core():
    """Memory that lives now and that the core's own files allocated: other threads of this process do not count."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/core_service/*")])
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_soak(scale, overlap):
    total = 10_000 * (1 if scale == 1 else 4)
    rng = random.Random(1)
    blocks = BlockManager(24, BLOCK)
    config = SchedulerConfig(
        6, 24, priority_ageing=20.0, preemption_victim="cheapest" if overlap else "last", watermark=0.1
    )
    scheduler = Scheduler(blocks, config)
    runner = FakeRunner(VOCAB, BLOCK)
    live: dict[int, Sequence] = {}
    ended = added = slot = 0
    now = 0.0
    tracemalloc.start()
    baseline = 0
    under_way = None
    while added < total or live:
        now += 1
        outputs = EngineOutputs()
        while added < total and len(live) < 40 and rng.random() < 0.7:
            request = make_request(rng, now, slot)
            scheduler.add(request)
            live.update((sequence.slot, sequence) for sequence in request.sequences)
            slot += len(request.sequences)
            added += 1
        if live and rng.random() < 0.1:
            scheduler.abort(rng.choice(list(live.values())), outputs)
        if rng.random() < 0.005:
            scheduler.reset_prefix_cache()
        scheduler.expire(now, outputs)
        step = scheduler.schedule(now, outputs)
        finished, under_way = under_way, None
        if finished is not None:
            scheduler.take_tokens(*finished)
        if step is not None:
            under_way = (step, runner.execute(scheduler.launch(step)))
        if under_way is not None and not overlap:
            finished, under_way = under_way, None
            scheduler.take_tokens(*finished)
        if finished is not None:
            scheduler.update(*finished, now, outputs)
        for record in outputs.finished:
            assert live.pop(record.sequence.slot) is record.sequence
            ended += 1
        if scheduler.counters.steps % 97 == 0:
            scheduler.check_integrity()
        if not baseline and added >= total // 4:
            baseline = bytes_of_the_core()
    assert ended == slot
    assert scheduler.counters.preemptions > added / 50
    assert blocks.num_free == blocks.num_usable
    scheduler.check_integrity()
    grown = bytes_of_the_core() - baseline
    tracemalloc.stop()
    assert grown < 128 * 1024, f"{grown} bytes more than after a quarter of the requests"
