"""What it costs to recognize a cached prompt: our prefix tree against a SHA-256 chain over the same blocks.

usage: python benchmarks/block_identity.py     prints a table; figures are µs per prompt of 2,048 tokens, 128 blocks
"""

import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from headrace.core_service.prefix_cache import ROOT, PrefixCache

BLOCK_SIZE, PROMPT_LEN, PROMPTS = 16, 2048, 256
NUM_BLOCKS = PROMPT_LEN // BLOCK_SIZE
BLOCK_BYTES = BLOCK_SIZE * 4


def make_prompts() -> list[bytes]:
    """Distinct prompts."""
    tokens = np.random.default_rng(0).integers(0, 49152, (PROMPTS, PROMPT_LEN), dtype=np.int32)
    return [prompt.tobytes() for prompt in tokens]


def chain(prompt: bytes) -> list[bytes]:
    """The SHA-256 chain of a prompt's blocks."""
    hashes, parent = [], b""
    for start in range(0, len(prompt), BLOCK_BYTES):
        parent = hashlib.sha256(parent + prompt[start : start + BLOCK_BYTES]).digest()
        hashes.append(parent)
    return hashes


def median_us(work: Callable[[bytes], object], prompts: list[bytes]) -> tuple[float, float, float]:
    """Median, least and most of seven runs over all prompts, in µs per prompt."""
    runs = []
    for _ in range(7):
        start = time.perf_counter()
        for prompt in prompts:
            work(prompt)
        runs.append((time.perf_counter() - start) / len(prompts) * 1e6)
    return statistics.median(runs), min(runs), max(runs)


def main() -> None:
    """Fills both indexes with all prompts, then looks each prompt up."""
    prompts = make_prompts()
    tree = PrefixCache(BLOCK_SIZE)
    table: dict[bytes, int] = {}
    for number, prompt in enumerate(prompts):
        node: int | None = ROOT
        for i, digest in enumerate(chain(prompt)):
            block = 1 + number * NUM_BLOCKS + i
            table[digest] = block
            assert node is not None
            node = tree.store(block, node, (), prompt[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])

    def look_up_chain(prompt: bytes) -> list[int]:
        return [table[digest] for digest in chain(prompt)]

    def look_up_tree(prompt: bytes) -> list[int]:
        return tree.match(prompt, NUM_BLOCKS, ())[0]

    assert all(look_up_chain(prompt) == look_up_tree(prompt) for prompt in prompts)
    print("| 256 cached prompts of 2,048 tokens | median µs | least | most |")
    print("| --- | --- | --- | --- |")
    for name, work in (("SHA-256 chain", look_up_chain), ("prefix tree", look_up_tree)):
        print("| {} | {:.0f} | {:.0f} | {:.0f} |".format(name, *median_us(work, prompts)))


if __name__ == "__main__":
    main()
