"""Steps of paged attention over made-up sequences, and what they should give."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.layer_kernels import LayerKernels, StepFacts


@dataclass
class Sequence:
    """Queries [length, num_heads, head_dim], keys and values [length, num_kv_heads, head_dim] of all its tokens."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(
        cls, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int, scale: float = 1.0
    ) -> "Sequence":
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        return cls(
            *(
                (torch.randn(length, count, head_dim, generator=generator) * scale).to(dtype)
                for count in (num_heads, num_kv_heads, num_kv_heads)
            )
        )

    def attention(self, window: int | None) -> torch.Tensor:
        """Plain attention in float64: [length, num_heads, head_dim]."""
        length, num_heads, head_dim = self.queries.shape
        group = num_heads // self.keys.shape[1]
        keys, values = (part.double().repeat_interleave(group, 1) for part in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.queries.double(), keys) / math.sqrt(head_dim)
        places = torch.arange(length)
        hidden = places > places[:, None]
        if window is not None:
            hidden |= places <= places[:, None] - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def attend(
    kernels: LayerKernels,
    work: list[tuple[Sequence, int, int]],
    *,
    window: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    garbage: float = math.nan,
) -> list[torch.Tensor]:
    """One step that computes tokens first .. end-1 of each (sequence, first, end): what each gets, [new, heads, d].

    Blocks lie in random order; whatever no query may see, in the cache and in the block tables' ends, is garbage.
    """
    num_heads, head_dim = work[0][0].queries.shape[1:]
    num_kv_heads = work[0][0].keys.shape[1]
    dtype = work[0][0].queries.dtype
    ends = np.array([end for _, _, end in work], dtype=np.int32)
    sizes = [end - first for _, first, end in work]
    pages = -(-ends // block_size)
    blocks = np.random.default_rng(seed).permutation(np.arange(1, pages.sum() + 1))
    tables = np.zeros((len(work), int(pages.max())), dtype=np.int32)
    shape = (int(pages.sum()) + 1, num_kv_heads, block_size, head_dim)
    key_cache, value_cache = torch.full(shape, garbage, dtype=dtype), torch.full(shape, garbage, dtype=dtype)
    for row, ((sequence, first, end), last) in enumerate(zip(work, np.cumsum(pages).tolist(), strict=True)):
        tables[row, : pages[row]] = blocks[last - pages[row] : last]
        low = 0 if window is None else max(0, first - window + 1)
        places = np.arange(low, end)
        at = torch.from_numpy(tables[row, places // block_size].astype(np.int64)), torch.from_numpy(places % block_size)
        key_cache[at[0], :, at[1]] = sequence.keys[low:end]
        value_cache[at[0], :, at[1]] = sequence.values[low:end]
    facts = replace(
        empty_facts(sum(sizes), (num_heads, num_kv_heads), head_dim, block_size),
        query_start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        context_lens=ends,
        block_tables=tables,
    )
    queries = torch.cat([sequence.queries[first:end] for sequence, first, end in work])
    output = kernels.begin_step(facts).attend(queries, key_cache, value_cache, window)
    return list(torch.split(output, sizes))


def empty_facts(num_tokens: int, heads: tuple[int, int], head_dim: int, block_size: int) -> StepFacts:
    """Facts of a step with nothing filled in."""
    nothing: NDArray[np.int32] = np.zeros((1, 1), dtype=np.int32)
    angles = torch.zeros(num_tokens, 1, head_dim)
    return StepFacts(
        query_start=np.array([0, num_tokens], dtype=np.int32),
        context_lens=np.array([num_tokens], dtype=np.int32),
        block_tables=nothing,
        slot_mapping=np.zeros(num_tokens, dtype=np.int64),
        cos=angles,
        signed_sin=angles,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
    )
