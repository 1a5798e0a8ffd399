"""Times steps of a model and attention alone, for decodes and prompt chunks.

    python benchmarks/attention.py [--model PATH] [--dtype float32|bfloat16] [--kernels best|torch] [--threads N]

A decode step has `batch` sequences with `context` tokens each, and draws one token for each, greedily. A prompt step
computes all tokens of one prompt in chunks of 2,048 and draws one token; its attention is timed for the whole prompt at
once. Prints one line a case: median milliseconds of a step, and of attention in all layers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.common.demo_model import fetch_demo_model
from headrace.core_service.batch import SamplingColumns, ScheduledBatch
from headrace.core_service.model_runner import ModelRunner, build_runner
from headrace.kernels.best_kernels import best_kernels
from headrace.kernels.layer_kernels import LayerKernels, StepFacts
from headrace.kernels.torch_kernels import TorchKernels

BLOCK_SIZE = 16
CHUNK = 2048
DECODES = [(batch, context) for context in (188, 2048) for batch in (1, 8, 32)]
PROMPTS = (1000, 8000)


def make_batch(num_seqs: int, new_tokens: int, context: int) -> ScheduledBatch:
    """Sequences of one length, each with its last `new_tokens` tokens to be computed."""
    pages = -(-context // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_seqs * pages + 1)).reshape(num_seqs, pages)
    positions = np.arange(context - new_tokens, context)
    slots = blocks[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return ScheduledBatch(
        step=0,
        query_start=np.arange(0, num_seqs * new_tokens + 1, new_tokens, dtype=np.int32),
        token_ids=np.random.default_rng(1).integers(0, 40000, num_seqs * new_tokens).astype(np.int32),
        positions=np.tile(positions, num_seqs).astype(np.int32),
        slot_mapping=slots.reshape(-1).astype(np.int64),
        block_tables=blocks.astype(np.int32),
        context_lens=np.full(num_seqs, context, dtype=np.int32),
        sample_index=np.arange(1, num_seqs + 1, dtype=np.int64) * new_tokens - 1,
        sampling=SamplingColumns(
            temperature=np.zeros(num_seqs, dtype=np.float32),
            top_k=np.zeros(num_seqs, dtype=np.int32),
            top_p=np.ones(num_seqs, dtype=np.float32),
            min_p=np.zeros(num_seqs, dtype=np.float32),
            seed=np.zeros(num_seqs, dtype=np.uint64),
            output_position=np.zeros(num_seqs, dtype=np.int32),
            num_logprobs=np.full(num_seqs, -1, dtype=np.int32),
        ),
    )


def milliseconds(work: Callable[[], object], seconds: float = 1.5) -> float:
    """Median of as many calls as fit, but at least one, after one to warm up."""
    work()
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 200):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


@torch.inference_mode()
def attention_milliseconds(kernels: LayerKernels, runner: ModelRunner, batch: ScheduledBatch) -> float:
    """Attention alone in all layers: one layer's, over as many different caches as there are layers."""
    spec = runner.spec
    dtype = torch.float32 if runner.numerics.dtype == "float32" else torch.bfloat16
    shape = (int(batch.block_tables.max()) + 1, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(spec.num_layers)]
    queries = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim).to(dtype)
    nothing = torch.zeros(batch.num_tokens, 1, spec.head_dim)
    facts = StepFacts(
        query_start=batch.query_start,
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        slot_mapping=batch.slot_mapping,
        cos=nothing,
        signed_sin=nothing,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=BLOCK_SIZE,
    )

    def attend() -> None:
        step = kernels.begin_step(facts)
        for key_cache, value_cache in caches:
            step.attend(queries, key_cache, value_cache, None)

    return milliseconds(attend)


def execute_all(runner: ModelRunner, batches: list[ScheduledBatch]) -> None:
    for batch in batches:
        runner.execute(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model (default: the demo model)")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--kernels", choices=("best", "torch"), default="best")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    kernels: LayerKernels = best_kernels() if options.kernels == "best" else TorchKernels()
    for dtype in options.dtype or ("bfloat16", "float32"):
        memory = (2 if dtype == "bfloat16" else 4) << 30
        path = options.model or fetch_demo_model()
        runner = build_runner(path, kv_cache_memory=memory, dtype=dtype, block_size=BLOCK_SIZE, kernels=kernels)
        runner.warm_up()
        print(f"{dtype}, {kernels.name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
        for num_seqs, context in DECODES:
            batch = make_batch(num_seqs, 1, context)
            step = milliseconds(partial(runner.execute, batch))
            alone = attention_milliseconds(kernels, runner, batch)
            print(f"  decode {num_seqs:2} x {context:4}:  step {step:8.2f} ms   attention {alone:8.2f} ms", flush=True)
        for length in PROMPTS:
            chunks = [min(CHUNK, length - done) for done in range(0, length, CHUNK)]
            batches = [make_batch(1, size, sum(chunks[: i + 1])) for i, size in enumerate(chunks)]
            step = milliseconds(partial(execute_all, runner, batches))
            alone = attention_milliseconds(kernels, runner, make_batch(1, length, length))
            print(f"  prompt {length:9}:  steps {step:7.1f} ms   attention {alone:8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
