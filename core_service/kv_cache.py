"""The keys and values of all tokens in flight, in pages, and how many pages there is room for.

Each layer has one tensor of keys and one of values, [num_blocks, num_kv_heads, block_size, head_dim]. Block 0 is the
null block: it stands where a block table has no entry, and no sequence ever owns it.
"""

from pathlib import Path

import torch

from headrace.common.errors import StartupError
from headrace.common.quantities import format_size
from headrace.core_service.models.spec import ModelSpec

# The null block and at least one to use.
SMALLEST_NUM_BLOCKS = 2


class KVCache:
    """Preallocated pages of every layer."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if num_blocks < SMALLEST_NUM_BLOCKS:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least {SMALLEST_NUM_BLOCKS}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        # Written once now, so that the memory is there when it is needed. What a block holds beyond a sequence's own
        # tokens is never read, so blocks are not cleared when they change hands.
        keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.layers = [(keys[layer], values[layer]) for layer in range(spec.num_layers)]


def kv_bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize


def num_blocks_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, memory_bytes: int) -> int:
    """Blocks that fit into `memory_bytes`, the null block included.

    StartupError when that is more than the memory that is free now (taking it would have the process killed without a
    word), or when not even one usable block fits.
    """
    free = free_memory_bytes()
    if memory_bytes > free:
        raise StartupError(
            f"KV cache memory is {format_size(memory_bytes)}, but only {format_size(free)} of memory is free; "
            "choose less with --kv-cache-memory"
        )
    per_block = kv_bytes_per_block(spec, block_size, dtype)
    num_blocks = memory_bytes // per_block
    if num_blocks < SMALLEST_NUM_BLOCKS:
        raise StartupError(
            f"KV cache memory is {format_size(memory_bytes)} ({memory_bytes} bytes), but {SMALLEST_NUM_BLOCKS} blocks "
            f"of {block_size} tokens take {format_size(SMALLEST_NUM_BLOCKS * per_block)} "
            f"({SMALLEST_NUM_BLOCKS * per_block} bytes)"
        )
    return num_blocks


def free_memory_bytes() -> int:
    """Memory that this process may still take: what the host has available, and what its control group allows."""
    available = _host_available_bytes()
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        written = limit.read_text().strip()
        if written != "max":
            available = min(available, max(0, int(written) - int(used.read_text())))
    return available


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StartupError("/proc/meminfo has no MemAvailable; give the KV cache's size explicitly")
