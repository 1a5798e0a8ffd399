"""Paged attention equals plain attention over each sequence's own keys, whatever shares the step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import attention_plan
from headrace.kernels.attention_plan import plan_attention
from headrace.kernels.kv_write import cache_rows, kv_write
from headrace.kernels.paged_attention import paged_attention

HEAD_DIM, BLOCK_SIZE = 8, 4


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The last queries [n, num_heads, d] of a sequence with keys and values [context, num_kv_heads, d], in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / math.sqrt(queries.shape[-1])
    key_positions = torch.arange(len(keys))
    query_positions = torch.arange(len(keys) - len(queries), len(keys))[:, None]
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def check_step(
    sequences: list[tuple[int, int]], window: int | None, dtype: torch.dtype, tolerance: float, heads: tuple[int, int]
) -> None:
    """One step over sequences given as (tokens in the cache, new tokens)."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    context_lens = np.array([cached + new for cached, new in sequences], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum([new for _, new in sequences]))).astype(np.int32)
    num_pages = -(-context_lens // BLOCK_SIZE)
    block_tables = np.zeros((len(sequences), num_pages.max()), dtype=np.int32)
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_pages.sum() + 1))
    for seq, (pages, end) in enumerate(zip(num_pages, np.cumsum(num_pages), strict=True)):
        block_tables[seq, :pages] = blocks[end - pages : end]
    shape = (int(num_pages.sum()) + 1, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
    # Pages hold garbage before they are written; only the null block and finite values are promised.
    key_cache, value_cache = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    queries = torch.randn(int(query_start[-1]), num_heads, HEAD_DIM, generator=generator).to(dtype)
    expected = []
    for seq, context_len in enumerate(context_lens):
        keys, values = (
            torch.randn(int(context_len), num_kv_heads, HEAD_DIM, generator=generator).to(dtype) for _ in range(2)
        )
        positions = np.arange(context_len)
        slots = block_tables[seq, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        rows = cache_rows(torch.from_numpy(slots), num_kv_heads, BLOCK_SIZE)
        kv_write(keys, values, key_cache, value_cache, rows)
        new = queries[query_start[seq] : query_start[seq + 1]]
        expected.append(plain_attention(new, keys, values, window))
    plan = plan_attention(
        query_start,
        context_lens,
        block_tables,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        window=window,
        dtype=dtype,
    )
    actual = paged_attention(queries, key_cache, value_cache, plan)
    torch.testing.assert_close(actual.double(), torch.cat(expected), atol=tolerance, rtol=0)


SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, st.sampled_from([None, 1, 3, 4, 17]), st.sampled_from([(4, 2), (3, 3), (6, 1)]))
def test_every_mix_of_prompts_and_decodes_equals_plain_attention(
    sequences: list[tuple[int, int]], window: int | None, heads: tuple[int, int]
) -> None:
    check_step(sequences, window, torch.float32, 1e-5, heads)


@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_is_near(window: int | None) -> None:
    check_step([(33, 1), (0, 12), (5, 1), (7, 3)], window, torch.bfloat16, 3e-2, (4, 2))


@pytest.mark.parametrize("window", [None, 3, 11])
def test_tiles_and_groups_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention_plan, "QUERY_TILE", 5)
    monkeypatch.setattr(attention_plan, "MAX_GATHERED_KEYS", 16)
    check_step([(0, 23), (9, 1), (10, 1), (11, 1), (30, 7), (31, 1)], window, torch.float32, 1e-5, (4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 128)])
def test_a_decode_is_bitwise_the_same_alone_and_in_a_batch(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    torch.set_num_threads(1)
    context_lens = np.array([1, 5, 16, 17, 60, 129, 188, 250, 300, 511, 700, 1000], dtype=np.int32)
    num_pages = -(-int(context_lens.max()) // 16)
    block_tables = 1 + np.arange(len(context_lens) * num_pages, dtype=np.int32).reshape(-1, num_pages)
    shape = (block_tables.size + 1, num_kv_heads, 16, head_dim)
    key_cache, value_cache = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    queries = torch.randn(len(context_lens), num_heads, head_dim).to(dtype)

    def attend(seqs: list[int]) -> torch.Tensor:
        plan = plan_attention(
            np.arange(len(seqs) + 1, dtype=np.int32),
            context_lens[seqs],
            block_tables[seqs],
            block_size=16,
            num_kv_heads=num_kv_heads,
            window=None,
            dtype=dtype,
        )
        return paged_attention(queries[seqs], key_cache, value_cache, plan)

    together = attend(list(range(len(context_lens))))
    for seq in range(len(context_lens)):
        assert torch.equal(attend([seq])[0], together[seq])


def test_padding_adds_at_most_half_of_the_keys_of_a_decode() -> None:
    context_lens = np.arange(1, 400, dtype=np.int32)
    plan = plan_attention(
        np.arange(len(context_lens) + 1, dtype=np.int32),
        context_lens,
        np.ones((len(context_lens), 100), dtype=np.int32),
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        window=None,
        dtype=torch.float32,
    )
    for group in plan.decodes:
        pages = -(-context_lens[group.token_rows.numpy()] // BLOCK_SIZE)
        assert 2 * group.mask.shape[-1] <= 3 * BLOCK_SIZE * pages.min()
    assert sorted(torch.cat([group.token_rows for group in plan.decodes]).tolist()) == list(range(399))
