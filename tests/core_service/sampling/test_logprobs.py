import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.core_service.batch import LogprobRows, SamplingColumns
from headrace.core_service.sampling.logprobs import prompt_logprob_rows, sample_logprob_rows


def normal_logits(rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


def make_columns(num_logprobs: list[int], logprob_ids: dict[int, list[int]] | None = None) -> SamplingColumns:
    count = len(num_logprobs)
    return SamplingColumns(
        temperature=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        output_position=np.zeros(count, np.int32),
        num_logprobs=np.array(num_logprobs, np.int32),
        logprob_ids={row: np.array(ids, np.int32) for row, ids in (logprob_ids or {}).items()},
    )


def entries(found: LogprobRows, index: int) -> tuple[list[int], NDArray[np.float32], list[int]]:
    """Ids, values and ranks of the index-th row."""
    part = slice(found.offsets[index], found.offsets[index + 1])
    return found.token_ids[part].tolist(), found.values[part], found.ranks[part].tolist()


def in_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("vocab_size", [5, 1000, 49_155])
def test_rows_hold_the_token_then_the_most_likely_then_those_asked_for(vocab_size: int) -> None:
    logits = normal_logits(24, vocab_size)
    wanted = [i % 6 - 1 for i in range(24)]
    asked = {0: [3, 1], 5: [vocab_size - 1], 6: list(range(5)) * 20}
    tokens = np.arange(24, dtype=np.int32) % vocab_size
    found = sample_logprob_rows(logits, tokens, make_columns(wanted, asked))
    assert found is not None
    assert found.rows.tolist() == [i for i in range(24) if wanted[i] >= 0 or i in asked]
    exact = torch.log_softmax(logits, -1)
    for index, row in enumerate(found.rows.tolist()):
        order = in_order(logits[row])
        ids, values, ranks = entries(found, index)
        assert ids == [tokens[row], *order[: max(wanted[row], 0)], *asked.get(row, [])]
        assert torch.equal(torch.from_numpy(values), exact[row, ids])
        assert ranks == [order.index(token) + 1 for token in ids]


def test_none_is_returned_when_nothing_is_asked_for() -> None:
    assert sample_logprob_rows(normal_logits(3, 10), np.zeros(3, np.int32), make_columns([-1, -1, -1])) is None


def test_a_request_for_logprobs_leaves_the_columns_as_they_were() -> None:
    columns = make_columns([-1, 2], {0: [1]})
    sample_logprob_rows(normal_logits(2, 10), np.zeros(2, np.int32), columns)
    assert columns.num_logprobs.tolist() == [-1, 2]


def test_the_whole_vocabulary_and_more_give_every_token_once() -> None:
    logits = normal_logits(2, 300)
    logits[0, :100] = -torch.inf
    for count in (300, 1000):
        found = prompt_logprob_rows(logits, np.array([250, 7], np.int32), count)
        for row, target in enumerate((250, 7)):
            ids, values, ranks = entries(found, row)
            order = in_order(logits[row])
            assert ids == [target, *order]
            assert ranks == [order.index(target) + 1, *range(1, 301)]
            assert np.exp(values[1:].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 4, 20, 500])
def test_ranks_of_equal_logits_follow_ids(count: int) -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 700] = 1
    ids, values, ranks = entries(prompt_logprob_rows(logits, np.array([3], np.int32), count), 0)
    assert ids == [3, *[700, *range(499)][:count]]
    assert ranks == [5, *range(1, count + 1)]
    assert (values[ids.index(3)] == values[0]).all()


def test_few_possible_tokens_are_followed_by_impossible_ones() -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 40] = 0
    ids, values, ranks = entries(prompt_logprob_rows(logits, np.array([40], np.int32), 3), 0)
    assert ids == [40, 40, 0, 1]
    assert values.tolist() == [0, 0, -np.inf, -np.inf]
    assert ranks == [1, 1, 2, 3]


def test_prompt_rows_agree_with_sampled_rows() -> None:
    logits, targets = normal_logits(40, 33_000), np.arange(40, dtype=np.int32) * 800
    prompt = prompt_logprob_rows(logits, targets, 5)
    sampled = sample_logprob_rows(logits, targets, make_columns([5] * 40))
    assert sampled is not None
    for name in ("rows", "offsets", "token_ids", "values", "ranks"):
        assert (getattr(prompt, name) == getattr(sampled, name)).all()


def test_chosen_ids_come_last_in_every_prompt_row() -> None:
    logits, targets = normal_logits(40, 33_000), np.arange(40, dtype=np.int32) * 800
    more = np.array([32_999, 5, 0], np.int32)
    found = prompt_logprob_rows(logits, targets, 2, more)
    plain = prompt_logprob_rows(logits, targets, 2)
    logprobs = torch.log_softmax(logits, -1).numpy()
    for row in range(40):
        ids, values, ranks = entries(found, row)
        assert ids[:3] == entries(plain, row)[0]
        assert ids[3:] == more.tolist()
        assert (values == logprobs[row, ids]).all()
        assert ranks[3:] == [1 + int((logits[row] > logits[row, token]).sum()) for token in more.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_probabilities_are_left_out(bad: float) -> None:
    logits = normal_logits(4, 50)
    logits[2] = bad
    if bad != -float("inf"):
        logits[0, 9] = bad
    found = prompt_logprob_rows(logits, np.array([9, 9, 9, 9], np.int32), 3)
    assert found.rows.tolist() == ([0, 1, 3] if bad == -float("inf") else [1, 3])
    assert found.offsets.tolist() == [4 * i for i in range(len(found.rows) + 1)]
    assert len(prompt_logprob_rows(logits[2:3], np.array([9], np.int32), 3).rows) == 0


def test_rows_without_a_token_are_left_out() -> None:
    found = sample_logprob_rows(normal_logits(3, 50), np.array([5, -1, 6], np.int32), make_columns([1, 1, -1]))
    assert found is not None
    assert found.rows.tolist() == [0]


def test_no_rows_give_an_empty_result() -> None:
    found = prompt_logprob_rows(torch.empty(0, 50), np.empty(0, np.int32), 3)
    assert found.offsets.tolist() == [0]
    assert len(found.rows) == len(found.token_ids) == len(found.values) == len(found.ranks) == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        prompt_logprob_rows(normal_logits(2, 5), np.zeros(1, np.int32), 1)
    with pytest.raises(ValueError, match="num_logprobs -1"):
        prompt_logprob_rows(normal_logits(1, 5), np.zeros(1, np.int32), -1)
