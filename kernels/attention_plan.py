"""What paged attention needs to know about a step, worked out once and used by every layer.

Sequences with one new token (decodes) are computed together, in groups of similar context length; those with several
(chunks of a prompt) one at a time, in tiles of queries:

    keys of one sequence     first_key                      context_len
                             |--- cached --|--- new -------|
    queries (new tokens)                   |-- tile --|tile|     token i sees keys up to its own position
                                                                 and, with a window w, only the last w of them
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

# A decode's pages are padded to one of these numbers: to half as many again at most. What a sequence is padded to
# follows from its own context alone, never from its group, so that its result has the same bits in any batch.
PADDED_PAGES = np.array(sorted({step << k for k in range(24) for step in (2, 3)} | {1}))
# Keys gathered at once for a group of decodes; bounds the memory of the gathered copies.
MAX_GATHERED_KEYS = 65_536
# Queries of a prompt chunk that share one mask, which leaves out the keys that none of them sees.
QUERY_TILE = 512
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single queries whose contexts are padded to the same number of pages."""

    token_rows: torch.Tensor  # [group] flat token indices, int64
    pages: torch.Tensor  # [group * num_kv_heads * num_pages] int64: block * num_kv_heads + head
    mask: torch.Tensor  # [group, 1, 1, num_keys] float32: 0 where a key is seen, else -inf


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Some consecutive queries of one sequence."""

    tokens: slice  # flat token indices
    keys: slice  # among the gathered keys of the sequence
    mask: torch.Tensor  # [queries, keys] in the compute type: 0 where a key is seen, else -inf


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several new tokens of one sequence."""

    pages: torch.Tensor  # [num_kv_heads * num_pages] int64: block * num_kv_heads + head
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's attention for all layers with the same window."""

    num_tokens: int
    block_size: int
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]


def plan_attention(
    query_start: Int32Array,  # [num_seqs + 1]
    context_lens: Int32Array,  # [num_seqs]
    block_tables: Int32Array,  # [num_seqs, most blocks]
    *,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Groups a step's sequences; the arrays are those of `ScheduledBatch`, `dtype` is the type of the queries."""
    query_lens = np.diff(query_start)
    context = context_lens.astype(np.int64)
    heads = np.arange(num_kv_heads)
    decodes = [
        _decode_group(seqs, num_pages, query_start, context, block_tables, heads, block_size, window)
        for seqs, num_pages in _groups_of_similar_length(np.flatnonzero(query_lens == 1), context, block_size, window)
    ]
    chunks = [
        _prompt_chunk(
            int(query_start[seq]),
            int(query_lens[seq]),
            int(context[seq]),
            block_tables[seq],
            heads,
            block_size,
            window,
            dtype,
        )
        for seq in np.flatnonzero(query_lens > 1)
    ]
    return AttentionPlan(int(query_start[-1]), block_size, tuple(decodes), tuple(chunks))


def _first_page(first_query_position: Int64Array, block_size: int, window: int | None) -> Int64Array:
    """The first page that holds a key which the query sees."""
    if window is None:
        return np.zeros_like(first_query_position)
    return np.maximum(first_query_position - window + 1, 0) // block_size


def _groups_of_similar_length(
    seqs: Int64Array, context: Int64Array, block_size: int, window: int | None
) -> list[tuple[Int64Array, int]]:
    """Splits decodes by the number of pages that they are padded to, and bounds the keys of a group."""
    num_pages = -(-context[seqs] // block_size) - _first_page(context[seqs] - 1, block_size, window)
    padded = PADDED_PAGES[np.searchsorted(PADDED_PAGES, num_pages)]
    groups: list[tuple[Int64Array, int]] = []
    for pages in np.unique(padded).tolist():
        members = seqs[padded == pages]
        limit = max(1, MAX_GATHERED_KEYS // (pages * block_size))
        groups += [(members[i : i + limit], pages) for i in range(0, len(members), limit)]
    return groups


def _decode_group(
    seqs: Int64Array,
    num_pages: int,
    query_start: Int32Array,
    context: Int64Array,
    block_tables: Int32Array,
    heads: Int64Array,
    block_size: int,
    window: int | None,
) -> DecodeGroup:
    first_page = _first_page(context[seqs] - 1, block_size, window)
    # Pages past the end of a context are clipped to some page of the table: the mask hides them.
    columns = np.minimum(first_page[:, None] + np.arange(num_pages), block_tables.shape[1] - 1)
    blocks = block_tables[seqs[:, None], columns].astype(np.int64)
    positions = first_page[:, None] * block_size + np.arange(num_pages * block_size)
    seen = positions < context[seqs, None]
    if window is not None:
        seen &= positions >= context[seqs, None] - window
    mask = np.where(seen, np.float32(0), np.float32(MASKED))
    return DecodeGroup(
        token_rows=torch.from_numpy(query_start[seqs].astype(np.int64)),
        pages=torch.from_numpy(_pages(blocks, heads)),
        mask=torch.from_numpy(mask)[:, None, None, :],
    )


def _prompt_chunk(
    start: int,
    num_queries: int,
    context_len: int,
    block_table: Int32Array,
    heads: Int64Array,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> PromptChunk:
    offset = context_len - num_queries  # position of the first query
    first_page = int(_first_page(np.array([offset]), block_size, window)[0])
    blocks = block_table[first_page : -(-context_len // block_size)].astype(np.int64)
    first_key = first_page * block_size
    tiles = []
    for tile_start in range(0, num_queries, QUERY_TILE):
        tile_end = min(tile_start + QUERY_TILE, num_queries)
        queries = torch.arange(offset + tile_start, offset + tile_end)
        low = first_key if window is None else max(first_key, offset + tile_start - window + 1)
        high = offset + tile_end
        keys = torch.arange(low, high)
        seen = keys <= queries[:, None]
        if window is not None:
            seen &= keys > queries[:, None] - window
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, MASKED)
        tiles.append(
            QueryTile(slice(start + tile_start, start + tile_end), slice(low - first_key, high - first_key), mask)
        )
    return PromptChunk(torch.from_numpy(_pages(blocks[None], heads)), tuple(tiles))


def _pages(blocks: Int64Array, heads: Int64Array) -> Int64Array:
    """Rows of a cache seen as [num_blocks * num_kv_heads, ...] for blocks [seqs, pages], head by head."""
    return (blocks[:, None, :] * len(heads) + heads[:, None]).reshape(-1)
