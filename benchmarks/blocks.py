"""What KV blocks cost on the engine's thread, and what those pay who watch KV events.

usage: python benchmarks/blocks.py     prints a table; blocks of 16 tokens, 128 a sequence, in a pool of 65,536

Each figure is the median of seven runs, with the least and the most.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from headrace.common.block_hashes import BlockKeys, block_hashes, root_hash
from headrace.core_service.block_manager import BlockManager
from headrace.core_service.kv_event_feed import KvEventFeed
from headrace.core_service.kv_event_reader import KvEventReader
from headrace.core_service.prefix_cache import ROOT

SIZE, LENGTH, POOL = 16, 128, 65_536  # tokens a block, blocks a sequence, blocks
PROMPTS = POOL // LENGTH
RUNS = 7
PLAIN = BlockKeys()

Prompt = bytes  # [LENGTH * SIZE] int32


def make_prompts(seed: int) -> list[Prompt]:
    """As many distinct prompts as fill the pool."""
    tokens = np.random.default_rng(seed).integers(0, 49152, (PROMPTS, LENGTH * SIZE), dtype=np.int32)
    return [prompt.tobytes() for prompt in tokens]


def pieces(prompt: Prompt) -> Iterator[bytes]:
    """The bytes of its blocks."""
    step = SIZE * 4
    return (prompt[start : start + step] for start in range(0, len(prompt), step))


def chain(prompt: Prompt) -> list[bytes]:
    """The SHA-256 chain of a prompt's blocks."""
    hashes, parent = [], b""
    for piece in pieces(prompt):
        parent = hashlib.sha256(parent + piece).digest()
        hashes.append(parent)
    return hashes


def store(manager: BlockManager, blocks: list[int], prompt: Prompt) -> None:
    """Makes a sequence's blocks findable."""
    node: int | None = ROOT
    for block, piece in zip(blocks, pieces(prompt), strict=True):
        assert node is not None
        node = manager.store(block, node, b"", piece)


def allocate(manager: BlockManager) -> list[int]:
    """A sequence's blocks; what they held is evicted."""
    blocks = manager.allocate(LENGTH)
    assert blocks is not None
    return blocks


def filled(prompts: list[Prompt]) -> BlockManager:
    """A manager whose blocks are all free and cached."""
    manager = BlockManager(POOL + 1, SIZE)
    for prompt in prompts:
        blocks = allocate(manager)
        store(manager, blocks, prompt)
        manager.free(blocks)
    return manager


def per_block(work: Callable[[], None], blocks: int = POOL) -> float:
    """Microseconds a block of one run."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / blocks * 1e6


def turn_over(manager: BlockManager, prompts: list[Prompt]) -> dict[str, float]:
    """Allocates, stores and frees the whole pool, evicting what was there; microseconds a block of each."""
    held: list[list[int]] = []

    def take() -> None:
        held.extend(allocate(manager) for _ in prompts)

    def store_all() -> None:
        for blocks, prompt in zip(held, prompts, strict=True):
            store(manager, blocks, prompt)

    def free() -> None:
        for blocks in held:
            manager.free(blocks)

    return {"allocate, evicting": per_block(take), "store": per_block(store_all), "free": per_block(free)}


def hash_all(feed: KvEventFeed, reader: KvEventReader) -> None:
    """What the event loop does for those who watch."""
    while feed.hash_some():
        pass
    while reader.take_message() is not None:
        pass


def run(number: int) -> dict[str, float]:
    """One run of everything."""
    prompts, others = make_prompts(2 * number), make_prompts(2 * number + 1)
    manager = filled(prompts)
    table = {digest: block for prompt in prompts for block, digest in enumerate(chain(prompt))}
    figures = {
        "recognize a cached block: tree": per_block(lambda: find_all(manager, prompts)),
        "recognize a cached block: SHA-256 chain": per_block(lambda: look_up_all(table, prompts)),
        "names for a gateway, `block_hashes`": per_block(lambda: name_all(prompts)),
    }
    empty = BlockManager(POOL + 1, SIZE, enable_prefix_caching=False)
    figures["allocate and free, nothing cached"] = per_block(lambda: take_and_free(empty))
    figures |= turn_over(manager, others)
    reader, feed = KvEventReader(), KvEventFeed(lambda: None, max_queued=4 * POOL)
    feed.add_reader(reader)
    figures["watched: tell the whole tree (engine's thread)"] = per_block(lambda: manager.watch(feed))
    figures["watched: hash and tell a stored block (event loop)"] = per_block(lambda: hash_all(feed, reader))
    watched = turn_over(manager, prompts)
    figures |= {f"watched: {name} (engine's thread)": cost for name, cost in watched.items()}
    figures["watched: hash and tell a removed and a stored block (event loop)"] = per_block(
        lambda: hash_all(feed, reader)
    )
    figures["check of every block, when idle"] = per_block(lambda: manager.check_integrity([]))
    return figures


def take_and_free(manager: BlockManager) -> None:
    """Each sequence alone."""
    for _ in range(PROMPTS):
        manager.free(allocate(manager))


def find_all(manager: BlockManager, prompts: list[Prompt]) -> None:
    """Looks each prompt up in the tree."""
    for prompt in prompts:
        assert len(manager.find_cached(prompt, LENGTH * SIZE + 1, PLAIN)[0]) == LENGTH


def look_up_all(table: dict[bytes, int], prompts: list[Prompt]) -> None:
    """The same with a table of hashes."""
    for prompt in prompts:
        assert len([table[digest] for digest in chain(prompt)]) == LENGTH


def name_all(prompts: list[Prompt]) -> None:
    """The hashes as they stand on the wire."""
    root = root_hash("")
    for prompt in prompts:
        block_hashes(root, np.frombuffer(prompt, np.int32), SIZE, PLAIN)


def main() -> None:
    """Prints the table."""
    runs = [run(number) for number in range(RUNS)]
    print("| µs a block | median | least | most |")
    print("| --- | --- | --- | --- |")
    for name in runs[0]:
        values = [figures[name] for figures in runs]
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
