"""What a draw costs: filters, edits, grammar masks and log-probabilities, for 32 and 256 rows on one thread.

usage: python benchmarks/sampler.py     prints a table; figures are µs per row, medians of 7, vocabulary 49,152
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.core_service.batch import Int32Array, LogitEdits, SamplingColumns, TokenHistory
from headrace.core_service.sampling.sampler import Sampler

VOCAB_SIZE = 49_152
ROWS = (32, 256)
TOP_LOGPROBS = 20
RANDOM = np.random.default_rng(0)
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
}


def ids(count: int) -> Int32Array:
    """Random token ids."""
    return RANDOM.integers(0, VOCAB_SIZE, count).astype(np.int32)


HISTORY = TokenHistory(prompt_ids=ids(1000), output_ids=ids(500))
EDITS = {
    "none": None,
    "10 biases": LogitEdits(bias_ids=ids(10), bias_values=np.ones(10, np.float32)),
    "1,000 allowed ids": LogitEdits(allowed_ids=ids(1000)),
    "10 bad words": LogitEdits(bad_words=tuple(ids(2) for _ in range(10))),
    "128 bad words": LogitEdits(bad_words=tuple(ids(2) for _ in range(128))),
    "repetition penalty": LogitEdits(repetition_penalty=1.1),
    "frequency and presence": LogitEdits(frequency_penalty=0.2, presence_penalty=0.5),
    "all penalties": LogitEdits(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.5),
}


class RandomMasks:
    """A grammar of every row that allows each token with probability 1/2."""

    def __init__(self, num_rows: int) -> None:
        self.rows = np.arange(num_rows, dtype=np.int32)
        self._masks = RANDOM.integers(-(2**31), 2**31, (num_rows, VOCAB_SIZE // 32)).astype(np.int32)

    def wait(self) -> Int32Array:
        """They are there."""
        return self._masks


def columns(num_rows: int, edits: LogitEdits | None, **draw: Any) -> SamplingColumns:
    """Rows that are all drawn in one way."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | draw
    every = dict.fromkeys(range(num_rows))
    return SamplingColumns(
        temperature=np.full(num_rows, values["temperature"], np.float32),
        top_k=np.full(num_rows, values["top_k"], np.int32),
        top_p=np.full(num_rows, values["top_p"], np.float32),
        min_p=np.full(num_rows, values["min_p"], np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
        output_position=np.zeros(num_rows, np.int32),
        num_logprobs=np.full(num_rows, -1, np.int32),
        edits={} if edits is None else dict.fromkeys(every, edits),
        histories={} if edits is None else dict.fromkeys(every, HISTORY),
    )


def median_us(logits: torch.Tensor, wanted: SamplingColumns) -> float:
    """Median of seven draws of the whole batch, in µs per row."""
    sampler = Sampler()
    sampler(logits, wanted)
    runs = []
    for _ in range(7):
        start = time.perf_counter()
        sampler(logits, wanted)
        runs.append((time.perf_counter() - start) / len(logits) * 1e6)
    return statistics.median(runs)


def main() -> None:
    """Every edit with every way to draw."""
    torch.set_num_threads(1)
    batches = [torch.randn(count, VOCAB_SIZE) * 3 for count in ROWS]
    print("| edits, µs a row for 32 / 256 rows |", " | ".join(DRAWS), "|")
    print("| --- |", " | ".join("---" for _ in DRAWS), "|")
    for name, edits in EDITS.items():
        wanted = [[columns(len(batch), edits, **draw) for batch in batches] for draw in DRAWS.values()]
        _print_row(name, batches, wanted)
    masks = [RandomMasks(count) for count in ROWS]
    wanted = [
        [replace(columns(len(batch), None, **draw), grammar=mask) for batch, mask in zip(batches, masks, strict=True)]
        for draw in DRAWS.values()
    ]
    _print_row("grammar masks", batches, wanted)
    wanted = [
        [
            replace(columns(len(batch), None, **draw), num_logprobs=np.full(len(batch), TOP_LOGPROBS, np.int32))
            for batch in batches
        ]
        for draw in DRAWS.values()
    ]
    _print_row(f"top {TOP_LOGPROBS} log-probabilities", batches, wanted)


def _print_row(name: str, batches: list[torch.Tensor], wanted: list[list[SamplingColumns]]) -> None:
    cells = []
    for of_draw in wanted:
        figures = [median_us(batch, one) for batch, one in zip(batches, of_draw, strict=True)]
        cells.append(" / ".join(f"{figure:.0f}" for figure in figures))
    print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
