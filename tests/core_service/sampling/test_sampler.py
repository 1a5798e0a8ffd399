"""The sampler against its law written out in plain Python, against float64 probabilities, and at its edges."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from distributions import assert_drawn_from
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sampling_oracle import INF, RowParams, make_columns, normal_logits, oracle_token, sample

from headrace.core_service.batch import NOT_FINITE, NOTHING_ALLOWED
from headrace.core_service.sampling.sampler import Sampler
from headrace.core_service.sampling.token_weights import MAX_VOCAB_SIZE

# --- The law ---

LOGIT = st.sampled_from([-INF, -3e38, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 4.0]) | st.floats(-30, 30, width=32)
PARAMS = st.builds(
    RowParams,
    temperature=st.just(0.0) | st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    top_k=st.just(0) | st.integers(1, 400),
    top_p=st.just(1.0) | st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24]),
    min_p=st.just(0.0) | st.sampled_from([1e-6, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    forbidden=st.just(()) | st.lists(st.integers(0, 2), max_size=3).map(tuple),
)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_follow_the_law(data: st.DataObject) -> None:
    rows = data.draw(st.lists(PARAMS, min_size=1, max_size=6))
    vocab_size = data.draw(st.integers(3, 300))
    logits = data.draw(arrays(np.float32, (len(rows), vocab_size), elements=LOGIT, fill=st.just(np.float32(-0.5))))
    assert sample(logits, rows) == [oracle_token(row, params) for row, params in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
def test_top_p_without_a_whole_sort_equals_the_whole_sort(scale: float, top_p: float) -> None:
    logits = normal_logits(12, 3001, scale=scale)
    rows = [RowParams(top_p=top_p, min_p=0.001 * (i % 2), seed=i) for i in range(12)]
    assert sample(logits, rows) == [oracle_token(row, params) for row, params in zip(logits, rows, strict=True)]


# --- Randomness; how draws are distributed is in test_draw_distributions.py ---


def test_neighbouring_seeds_and_positions_draw_independently() -> None:
    logits = np.zeros((200 * 200, 8), np.float32)
    rows = make_columns([RowParams()] * len(logits))
    seeds, positions = np.divmod(np.arange(len(logits)), 200)
    tokens, _ = Sampler()(
        torch.from_numpy(logits),
        replace(rows, seed=seeds.astype(np.uint64), output_position=positions.astype(np.int32)),
    )
    table = tokens.reshape(200, 200)
    for neighbours in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        pairs = (neighbours[0] * 8 + neighbours[1]).ravel()
        assert_drawn_from(pairs, np.full(64, 1 / 64))


# --- Batches ---


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def mixed_rows(count: int) -> list[RowParams]:
    kinds = [
        RowParams(temperature=0.0),
        RowParams(),
        RowParams(temperature=0.7, top_k=50),
        RowParams(top_p=0.9),
        RowParams(temperature=1.9, min_p=0.05),
        RowParams(top_k=300, top_p=0.8, min_p=0.001),
        RowParams(temperature=0.0, forbidden=(1, 2, 3)),
        RowParams(top_p=0.95, forbidden=(0,)),
    ]
    return [
        replace(kinds[i % 8], seed=i**7, position=i, num_logprobs=(i % 5) * 3 - 1, logprob_ids=(7, 4) * (i % 3 == 0))
        for i in range(count)
    ]


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("vocab_size", [1003, 33_000])
def test_a_row_gives_the_same_alone_and_among_others_with_1_and_2_threads(vocab_size: int) -> None:
    rows = mixed_rows(32)
    logits = torch.from_numpy(normal_logits(32, vocab_size))
    before = logits.clone()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        tokens, logprobs = Sampler()(logits, make_columns(rows))
        assert logprobs is not None
        row_entries = {}
        for i, row in enumerate(logprobs.rows.tolist()):
            entries = slice(logprobs.offsets[i], logprobs.offsets[i + 1])
            row_entries[row] = (
                logprobs.token_ids[entries].tolist(),
                logprobs.values[entries].tobytes(),
                logprobs.ranks[entries].tolist(),
            )
        results.append((tokens.tolist(), row_entries))
        for row, params in enumerate(rows):
            alone, alone_logprobs = Sampler()(logits[row : row + 1], make_columns([params]))
            assert alone.tolist() == [tokens[row]]
            if alone_logprobs is None:
                assert row not in row_entries
            else:
                ids, values, ranks = row_entries[row]
                assert alone_logprobs.token_ids.tolist() == ids
                assert alone_logprobs.values.tobytes() == values
                assert alone_logprobs.ranks.tolist() == ranks
    assert results[0] == results[1]
    assert torch.equal(logits, before)  # what the model gave is left as it was


def test_a_sampler_keeps_nothing_from_one_batch_to_the_next() -> None:
    sampler = Sampler()
    wide, narrow = torch.from_numpy(normal_logits(8, 500)), torch.from_numpy(normal_logits(8, 129, seed=1))
    columns = make_columns(mixed_rows(8))
    first = [sampler(logits, columns)[0].tolist() for logits in (wide, narrow, wide)]
    assert first == [Sampler()(logits, columns)[0].tolist() for logits in (wide, narrow, wide)]


def test_rows_that_are_not_side_by_side_in_memory_give_the_same() -> None:
    logits = torch.from_numpy(normal_logits(16, 400))
    strided = torch.empty(16, 800)[:, ::2].copy_(logits)
    columns = make_columns(mixed_rows(16))
    assert Sampler()(strided, columns)[0].tolist() == Sampler()(logits, columns)[0].tolist()


def test_an_empty_batch_gives_no_tokens() -> None:
    tokens, logprobs = Sampler()(torch.empty(0, 100), make_columns([]))
    assert tokens.shape == (0,)
    assert logprobs is None


# --- Edges ---

FILTERS = {
    "temperature": RowParams(),
    "cold": RowParams(temperature=0.4),
    "hot": RowParams(temperature=2.0),
    "top_k": RowParams(top_k=7),
    "top_p": RowParams(top_p=0.8),
    "min_p": RowParams(min_p=0.05),
    "top_k and top_p": RowParams(temperature=1.3, top_k=12, top_p=0.7),
    "min_p and top_p": RowParams(min_p=0.02, top_p=0.9),
    "min_p and top_k": RowParams(min_p=0.1, top_k=20),
    "all": RowParams(temperature=1.5, min_p=0.03, top_k=15, top_p=0.85, forbidden=(0, 4)),
}
KINDS = {**FILTERS, "greedy": RowParams(temperature=0.0), "greedy edited": RowParams(temperature=0.0, forbidden=(2,))}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample(np.array([[0, 5, 5, 1]], np.float32), [RowParams(temperature=0.0)]) == [1]
    assert sample(np.array([[0, 5, 5, 1]], np.float32), [RowParams(temperature=0.0, forbidden=(1,))]) == [2]


def test_top_k_ties_go_to_the_lowest_ids() -> None:
    logits = np.zeros((500, 700), np.float32)
    tokens = sample(logits, [RowParams(top_k=3, seed=seed) for seed in range(500)])
    assert set(tokens) == {0, 1, 2}


def test_top_p_ties_go_to_the_lowest_ids() -> None:
    logits = np.zeros((500, 40), np.float32)
    assert set(sample(logits, [RowParams(top_p=0.125, seed=seed) for seed in range(500)])) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", KINDS)
def test_the_only_possible_token_is_drawn(name: str) -> None:
    logits = np.full((20, 50), -np.inf, np.float32)
    logits[:, 17] = -1e4
    assert sample(logits, [replace(KINDS[name], seed=seed) for seed in range(20)]) == [17] * 20


@pytest.mark.parametrize(
    "params", [RowParams(top_k=1), RowParams(top_p=1e-38), RowParams(min_p=1.0), RowParams(temperature=1e-30)]
)
def test_the_narrowest_filters_leave_the_most_likely_token(params: RowParams) -> None:
    logits = normal_logits(50, 300)
    assert sample(logits, [replace(params, seed=seed) for seed in range(50)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [RowParams(top_k=100), RowParams(top_k=2**31 - 1), RowParams(min_p=1e-30)])
def test_filters_that_leave_all_change_nothing(params: RowParams) -> None:
    logits = normal_logits(200, 100)
    unfiltered = sample(logits, [RowParams(seed=seed) for seed in range(200)])
    assert sample(logits, [replace(params, seed=seed) for seed in range(200)]) == unfiltered


def test_logits_near_the_ends_of_float32_do_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([[largest, largest, -largest, 0]] * 100, np.float32)
    for params in FILTERS.values():
        tokens = sample(logits, [replace(params, forbidden=(), seed=seed) for seed in range(100)])
        assert set(tokens) <= {0, 1}
        assert len(set(tokens)) == 2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [[float("nan")], [INF], [-INF] * 60, [float("nan")] * 60], ids=str)
def test_a_row_without_a_finite_largest_logit_gets_no_token_and_harms_no_other(name: str, bad: list[float]) -> None:
    logits = normal_logits(9, 60)
    rows = [replace(KINDS[name], seed=seed, num_logprobs=2) for seed in range(9)]
    good = sample(logits, rows)
    logits[4, 2 : 2 + len(bad)] = bad[:58]
    logits[4, : max(0, len(bad) - 58)] = bad[58:]
    tokens, logprobs = Sampler()(torch.from_numpy(logits), make_columns(rows))
    assert tokens.tolist() == [*good[:4], NOT_FINITE, *good[5:]]
    assert logprobs is not None
    assert logprobs.rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert np.isfinite(logprobs.values).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_row_whose_tokens_are_all_forbidden_gets_no_token(name: str) -> None:
    rows = [KINDS[name], replace(KINDS[name], forbidden=tuple(range(60)))]
    assert sample(normal_logits(2, 60), rows)[1] == NOTHING_ALLOWED


def test_forbidden_tokens_are_never_drawn_but_keep_their_logprobs() -> None:
    logits = np.array([[9, 1, 0, 0]], np.float32)
    for seed in range(50):
        params = RowParams(forbidden=(0, 2), seed=seed, num_logprobs=1)
        tokens, logprobs = Sampler()(torch.from_numpy(logits), make_columns([params]))
        assert tokens[0] in (1, 3)
        assert logprobs is not None
        assert logprobs.token_ids.tolist() == [tokens[0], 0]


def test_misuse_is_refused() -> None:
    columns = make_columns([RowParams()])
    with pytest.raises(ValueError, match=r"float32 \[1, vocab\]"):
        Sampler()(torch.zeros(2, 10), columns)
    with pytest.raises(ValueError, match="float32"):
        Sampler()(torch.zeros(1, 10, dtype=torch.bfloat16), columns)
    with pytest.raises(ValueError, match="vocab_size"):
        Sampler()(torch.zeros(1, 1).expand(1, MAX_VOCAB_SIZE + 1), columns)
