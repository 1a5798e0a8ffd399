"""What preemption costs: tokens computed again, by which sequence gives its blocks up. No model, no clock.

usage: preemption.py
"""

import random
import statistics

import numpy as np

from headrace.common.params import SamplingParams
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.config import SchedulerConfig
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.fakes import FakeRunner
from headrace.core_service.request import Request, Sequence
from headrace.core_service.scheduler import Scheduler

VOCAB, BLOCK = 1000, 16
NUM_REQUESTS, AT_ONCE, NUM_BLOCKS = 300, 24, 400
PROMPT, OUTPUT = (16, 800), (16, 400)  # tokens, least and most
SEEDS = range(3)


def requests(seed: int) -> list[Request]:
    """Prompts that share nothing, all there at the start."""
    rng = random.Random(seed)
    result = []
    for number in range(NUM_REQUESTS):
        prompt = np.array([rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT))], np.int32)
        max_tokens = rng.randint(*OUTPUT)
        request = Request(
            internal_id=str(number),
            external_id="",
            client=1,
            prompt=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            eos_token_ids=(),
            length_limit=len(prompt) + max_tokens,
            priority=0,
            arrival=float(number),
            received=float(number),
        )
        request.sequences = [Sequence(request, slot=number, index=0, seed=0)]
        result.append(request)
    return result


def serve(seed: int, caching: bool, **settings: object) -> tuple[float, int, int]:
    """Tokens computed more than once as a share of those that had to be; preemptions; steps."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK, enable_prefix_caching=caching)
    scheduler = Scheduler(blocks, SchedulerConfig(AT_ONCE, 512, **settings))  # type: ignore[arg-type]
    runner = FakeRunner(VOCAB, BLOCK)
    todo = requests(seed)
    needed = sum(request.length_limit - 1 for request in todo)
    for request in todo:
        scheduler.add(request)
    now, computed = 0.0, 0
    while scheduler.has_work:
        now += 1
        outputs = EngineOutputs()
        step = scheduler.schedule(now, outputs)
        if step is not None:
            batch = scheduler.launch(step)
            computed += batch.num_tokens
            result = runner.execute(batch)
            scheduler.take_tokens(step, result)
            scheduler.update(step, result, now, outputs)
    return computed / needed - 1, scheduler.counters.preemptions, scheduler.counters.steps


def main() -> None:
    """Prints a table: medians over several loads, least to most."""
    for caching in (True, False):
        for watermark in (0.0, 0.05):
            for victim in ("last", "cheapest"):
                runs = [serve(seed, caching, preemption_victim=victim, watermark=watermark) for seed in SEEDS]
                shares = sorted(100 * share for share, _, _ in runs)
                preemptions = statistics.median(count for _, count, _ in runs)
                steps = statistics.median(count for _, _, count in runs)
                print(
                    f"prefix cache {'on ' if caching else 'off'}  watermark {watermark:.2f}  victim {victim:8}  "
                    f"computed again {statistics.median(shares):5.1f} % ({shares[0]:.1f}-{shares[-1]:.1f})  "
                    f"preemptions {preemptions:.0f}  steps {steps:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
