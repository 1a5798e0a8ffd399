"""Paged attention in plain PyTorch: the law of `layer_kernels` out of single rounded operations.

No matrix product is used: libraries sum in an order that depends on the shape. Sums over a head's dimensions and over a
tile's keys are loops of elementwise operations over many rows instead.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.layer_kernels import KEY_TILE, SPLIT_KEYS, StepFacts
from headrace.kernels.power_of_two import LOG2_E, power_of_two

Int64Array = NDArray[np.int64]

# Scores computed at once: bounds the memory of a step.
MOST_SCORES = 1 << 19
LOWEST = float("-inf")


@dataclass(slots=True)
class RunningSums:
    """What rows have summed up: weights relative to 2^highest."""

    highest: torch.Tensor  # [..., rows, 1]
    weight_sums: torch.Tensor  # [..., rows, 1]
    sums: torch.Tensor  # [..., rows, head_dim]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], head_dim: int) -> "RunningSums":
        """Nothing seen yet."""
        return cls(torch.full((*shape, 1), LOWEST), torch.zeros(*shape, 1), torch.zeros(*shape, head_dim))

    def merge(self, highest: torch.Tensor, weight_sums: torch.Tensor, sums: torch.Tensor) -> None:
        """Adds sums over further keys; changes nothing where they are over none."""
        joint = torch.maximum(self.highest, highest)
        reference = joint.masked_fill(joint == LOWEST, 0.0)  # rather than inf - inf
        kept, added = power_of_two(self.highest - reference), power_of_two(highest - reference)
        self.highest = joint
        self.weight_sums = self.weight_sums * kept + weight_sums * added
        self.sums = self.sums * kept + sums * added


@dataclass(frozen=True, slots=True)
class Split:
    """The keys of one split, for some sequences."""

    rows: torch.Tensor  # [num_seqs, num_kv_heads, num_keys] int64 rows of a cache seen as [-1, head_dim]
    absent: torch.Tensor  # [num_seqs, 1, num_keys, 1] true where no query sees a key: its row must not matter
    hidden: torch.Tensor  # [num_seqs, 1, num_queries, 1, num_keys] true where a query does not see a key


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Equally many consecutive new tokens of some sequences."""

    tokens: torch.Tensor  # [num_seqs, num_queries] flat token indices, int64
    positions: Int64Array  # [num_seqs, num_queries]
    block_tables: NDArray[np.int32]  # [num_seqs, most blocks]

    def splits(self, facts: StepFacts, window: int | None) -> list[Split]:
        """All splits of which a query sees a key, in order."""
        first = 0 if window is None else max(0, int(self.positions.min()) - window + 1)
        end = int(self.positions.max()) + 1
        starts = range(first // SPLIT_KEYS * SPLIT_KEYS, end, SPLIT_KEYS)
        return [self._split(facts, window, start, min(SPLIT_KEYS, _round_up(end - start))) for start in starts]

    def _split(self, facts: StepFacts, window: int | None, start: int, num_keys: int) -> Split:
        keys = np.arange(start, start + num_keys)
        seen = keys <= self.positions[:, :, None]  # [num_seqs, num_queries, num_keys]
        if window is not None:
            seen &= keys > self.positions[:, :, None] - window
        any_seen = seen.any(1)
        columns = np.minimum(keys // facts.block_size, self.block_tables.shape[1] - 1)
        blocks = np.where(any_seen, self.block_tables[:, columns].astype(np.int64), 0)
        heads = np.arange(facts.num_kv_heads)[:, None]
        rows = (blocks[:, None] * facts.num_kv_heads + heads) * facts.block_size + keys % facts.block_size
        return Split(
            torch.from_numpy(rows),
            torch.from_numpy(~any_seen)[:, None, :, None],
            torch.from_numpy(~seen)[:, None, :, None, :],
        )


@dataclass
class TorchAttention:
    """One step's attention for all layers."""

    facts: StepFacts
    _groups: list[QueryGroup] = field(init=False)
    _splits: dict[tuple[int, int | None], list[Split]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = _group_queries(self.facts)

    def __call__(
        self, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attends as `StepKernels.attend` says."""
        output = torch.empty_like(queries)
        for index, group in enumerate(self._groups):
            if (index, window) not in self._splits:
                self._splits[index, window] = group.splits(self.facts, window)
            splits = self._splits[index, window]
            output[group.tokens] = self._attend(queries[group.tokens], key_cache, value_cache, splits)
        return output

    def _attend(
        self, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, splits: list[Split]
    ) -> torch.Tensor:
        """queries [num_seqs, num_queries, num_heads, head_dim] → the same shape and type."""
        num_seqs, num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = self.facts.num_kv_heads
        group = num_heads // num_kv_heads
        # Rows of a KV head: its query heads for each query.
        rows = queries.float().view(num_seqs, num_queries, num_kv_heads, group, head_dim).transpose(1, 2)
        rows = rows.reshape(num_seqs, num_kv_heads, num_queries * group, head_dim)
        total = RunningSums.zeros(tuple(rows.shape[:-1]), head_dim)
        for split in splits:
            keys = _gather(key_cache, split)
            values = _gather(value_cache, split)
            part = _attend_split(rows, keys, values, split.hidden)
            total.merge(part.highest, part.weight_sums, part.sums)
        # Adding 0 turns -0, of which there may be more or fewer with the hidden keys beside, into 0.
        attended = (total.sums / total.weight_sums).add_(0.0)
        attended = attended.view(num_seqs, num_kv_heads, num_queries, group, head_dim).transpose(1, 2)
        return attended.reshape(queries.shape).to(queries.dtype)


def _attend_split(
    rows: torch.Tensor,  # [num_seqs, num_kv_heads, num_rows, head_dim] float32
    keys: torch.Tensor,  # [num_seqs, num_kv_heads, num_keys, head_dim] float32
    values: torch.Tensor,  # as keys
    hidden: torch.Tensor,  # [num_seqs, 1, num_queries, 1, num_keys]
) -> RunningSums:
    num_seqs, num_kv_heads, num_rows, head_dim = rows.shape
    num_keys = keys.shape[2]
    by_dim = keys.transpose(2, 3).contiguous()
    scores = torch.zeros(num_seqs, num_kv_heads, num_rows, num_keys)
    product = torch.empty_like(scores)
    for dim in range(head_dim):
        torch.mul(rows[..., dim : dim + 1], by_dim[:, :, dim : dim + 1], out=product)
        scores.add_(product)
    scores.mul_(LOG2_E / math.sqrt(head_dim))
    num_queries = hidden.shape[2]
    scores.view(num_seqs, num_kv_heads, num_queries, -1, num_keys).masked_fill_(hidden, LOWEST)

    tiled = scores.view(num_seqs, num_kv_heads, num_rows, -1, KEY_TILE)
    highest = tiled.amax(-1, keepdim=True)  # [num_seqs, num_kv_heads, num_rows, num_tiles, 1]
    weights = power_of_two(tiled - highest.masked_fill(highest == LOWEST, 0.0))
    tile_values = values.view(num_seqs, num_kv_heads, 1, -1, KEY_TILE, head_dim)
    sums = torch.zeros(*tiled.shape[:-1], head_dim)
    product = torch.empty_like(sums)
    for key in range(KEY_TILE):
        torch.mul(weights[..., key : key + 1], tile_values[..., key, :], out=product)
        sums.add_(product)
    weight_sums = _sum_by_halves(weights)

    part = RunningSums.zeros((num_seqs, num_kv_heads, num_rows), head_dim)
    for tile in range(tiled.shape[3]):
        part.merge(highest[..., tile, :], weight_sums[..., tile, :], sums[..., tile, :])
    return part


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, a power of two: → [..., 1]."""
    while (width := x.shape[-1]) > 1:
        x = x[..., : width // 2] + x[..., width // 2 :]
    return x


def _gather(cache: torch.Tensor, split: Split) -> torch.Tensor:
    """→ [num_seqs, num_kv_heads, num_keys, head_dim] float32, with zeros for keys that no query sees."""
    head_dim = cache.shape[-1]
    gathered = cache.view(-1, head_dim).index_select(0, split.rows.view(-1)).view(*split.rows.shape, head_dim)
    return gathered.float().masked_fill_(split.absent, 0.0)


def _group_queries(facts: StepFacts) -> list[QueryGroup]:
    query_lens = np.diff(facts.query_start)
    offsets = facts.context_lens.astype(np.int64) - query_lens  # position of each sequence's first new token
    most_queries = max(1, MOST_SCORES // (facts.num_heads * SPLIT_KEYS))
    groups = []
    decodes = np.flatnonzero(query_lens == 1)
    decodes = decodes[np.argsort(facts.context_lens[decodes], kind="stable")]  # neighbours have similarly many keys
    for first in range(0, len(decodes), most_queries):
        seqs = decodes[first : first + most_queries]
        tokens = facts.query_start[seqs].astype(np.int64)
        groups.append(QueryGroup(torch.from_numpy(tokens)[:, None], offsets[seqs][:, None], facts.block_tables[seqs]))
    for seq in np.flatnonzero(query_lens > 1).tolist():
        start, num_queries = int(facts.query_start[seq]), int(query_lens[seq])
        for first in range(0, num_queries, most_queries):
            queries = np.arange(first, min(first + most_queries, num_queries))
            flat = torch.from_numpy(start + queries)[None]
            groups.append(QueryGroup(flat, (offsets[seq] + queries)[None], facts.block_tables[seq : seq + 1]))
    return groups


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_TILE) * KEY_TILE
