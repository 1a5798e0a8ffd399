"""Edits of logits: against the plain oracle, their numbers, their order, and that they keep to their own row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from sampling_oracle import (
    INF,
    ListedMasks,
    RowParams,
    edited_logits,
    make_columns,
    normal_logits,
    oracle_token,
    sample,
)

from headrace.core_service.batch import NOT_FINITE, NOTHING_ALLOWED
from headrace.core_service.sampling.logit_edits import edit_logits_
from headrace.core_service.sampling.sampler import Sampler

LARGEST = float(np.finfo(np.float32).max)


def edit(logits: list[float], **params: Any) -> list[float]:
    """One row after its edits, by the code under test."""
    row = RowParams(**params)
    columns = make_columns([row], len(logits))
    work = torch.tensor([logits], dtype=torch.float32)
    edit_logits_(work, np.array([0]), columns, None if columns.grammar is None else columns.grammar.wait())
    edited: list[float] = work[0].tolist()
    return edited


# --- Against the oracle ---

TOKEN = st.integers(0, 6)
TOKENS = st.lists(TOKEN, max_size=8).map(tuple)
EDITED = st.builds(
    RowParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    forbidden=st.just(()) | TOKENS,
    in_grammar=st.none() | TOKENS,
    allowed=st.none() | st.lists(TOKEN, min_size=1).map(tuple),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    bias=st.dictionaries(TOKEN, st.floats(-100, 100, width=32), max_size=3).map(lambda b: tuple(b.items())),
    presence=st.just(0.0) | st.floats(-2, 2, width=32),
    frequency=st.just(0.0) | st.floats(-2, 2, width=32),
    repetition=st.just(1.0) | st.floats(0.125, 8, width=32) | st.sampled_from([1e-30, 1e30]),
    prompt=TOKENS,
    output=TOKENS,
)
LOGIT = st.sampled_from([-INF, -LARGEST, LARGEST, -0.0, 0.0, 1.0]) | st.floats(-30, 30, width=32)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_rows_with_edits_follow_the_law(data: st.DataObject) -> None:
    rows = data.draw(st.lists(EDITED, min_size=1, max_size=6))
    logits = data.draw(arrays(np.float32, (len(rows), data.draw(st.sampled_from([7, 40, 130]))), elements=LOGIT))
    assert sample(logits, rows) == [oracle_token(row, params) for row, params in zip(logits, rows, strict=True)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_edited_logits_equal_the_oracles_exactly(data: st.DataObject) -> None:
    params = data.draw(EDITED)
    logits = data.draw(arrays(np.float32, 40, elements=LOGIT))
    columns = make_columns([params], len(logits))
    work = torch.from_numpy(np.pad(logits, (0, 88), constant_values=-np.inf))[None]
    edit_logits_(work, np.array([0]), columns, None if columns.grammar is None else columns.grammar.wait())
    assert np.array_equal(work[0, :40].numpy(), edited_logits(logits, params))
    assert (work[0, 40:] == -np.inf).all()


# --- Numbers ---


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    edited = edit([3.0, -3.0, 1.5, 4.0, 0.0], repetition=2.0, prompt=(0, 1), output=(2, 2, 4))
    assert edited == [1.5, -6.0, 0.75, 4.0, 0.0]


def test_a_repetition_penalty_below_1_favours_what_was_there() -> None:
    assert edit([3.0, -3.0], repetition=0.5, prompt=(0, 1)) == [6.0, -1.5]


def test_frequency_counts_each_occurrence_in_the_output_only() -> None:
    assert edit([1.0, 1.0, 1.0], frequency=0.25, prompt=(0, 0), output=(1, 2, 2)) == [1.0, 0.75, 0.5]


def test_presence_counts_once_in_the_output_only() -> None:
    assert edit([1.0, 1.0, 1.0], presence=0.25, prompt=(0, 0), output=(1, 2, 2)) == [1.0, 0.75, 0.75]


def test_negative_penalties_add() -> None:
    assert edit([1.0, 1.0], presence=-0.5, frequency=-0.25, output=(0, 0)) == [2.0, 1.0]


def test_repetition_comes_before_frequency_and_presence() -> None:
    assert edit([8.0], repetition=2.0, frequency=1.0, presence=0.5, output=(0, 0)) == [1.5]


def test_bias_comes_before_penalties() -> None:
    assert edit([-1.0], bias=((0, 5.0),), repetition=2.0, prompt=(0,)) == [2.0]


def test_bias_is_added_once_to_its_ids() -> None:
    assert edit([1.0, 2.0, 3.0], bias=((0, -100.0), (2, 100.0))) == [-99.0, 2.0, 103.0]


def test_penalties_without_history_change_nothing() -> None:
    assert edit([1.0, -1.0], repetition=2.0, presence=1.0, frequency=1.0) == [1.0, -1.0]


@pytest.mark.parametrize(("penalty", "logit"), [(1e-30, 1e30), (1e30, -1e30), (1e-45, 1.0)])
def test_a_logit_that_penalties_push_past_float32_stays_finite(penalty: float, logit: float) -> None:
    edited = edit([logit, 0.0], repetition=penalty, prompt=(0,))
    assert edited == [LARGEST if logit > 0 else -LARGEST, 0.0]


def test_what_the_model_rules_out_stays_ruled_out() -> None:
    assert edit([-INF, 0.0], repetition=1e-30, presence=-2.0, bias=((0, 100.0),), output=(0,))[0] == -INF


# --- Allowed ids and bad words ---


def test_only_allowed_ids_are_left_with_their_logits() -> None:
    assert edit([1.0, 2.0, 3.0, 4.0], allowed=(3, 1)) == [-INF, 2.0, -INF, 4.0]


def test_a_bias_does_not_bring_back_what_is_not_allowed() -> None:
    assert edit([1.0, 2.0], allowed=(0,), bias=((1, 100.0),)) == [1.0, -INF]


def test_a_bad_word_of_one_token_is_never_drawn() -> None:
    assert edit([1.0, 2.0], bad_words=((1,),), output=(0,)) == [1.0, -INF]


def test_the_last_token_of_a_bad_word_is_barred_only_after_the_others() -> None:
    word = (0, 1, 2)
    assert edit([1.0] * 4, bad_words=(word,), output=(3, 0, 1)) == [1.0, 1.0, -INF, 1.0]
    for output in ((), (1,), (0,), (0, 1, 3), (1, 0)):
        assert edit([1.0] * 4, bad_words=(word,), output=output) == [1.0] * 4


def test_bad_words_are_looked_for_in_the_output_only() -> None:
    assert edit([1.0] * 3, bad_words=((0, 1),), prompt=(0,)) == [1.0] * 3


def test_a_bad_word_longer_than_the_output_does_not_match() -> None:
    assert edit([1.0] * 3, bad_words=((2, 0, 0, 1), (0, 2)), output=(0, 0)) == [1.0, 1.0, -INF]


def test_token_ids_that_share_bytes_are_not_confused() -> None:
    # 1 << 8 ends with the bytes of others if ids were compared without their places.
    assert edit([1.0] * 3, bad_words=((1 << 8, 2),), output=(1,)) == [1.0] * 3
    assert edit([1.0] * 3, bad_words=((1 << 8, 2),), output=(1 << 24, 1 << 8)) == [1.0, 1.0, -INF]


# --- Grammar masks ---


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 129, 1000])
def test_a_grammar_leaves_exactly_what_its_bits_allow(vocab_size: int) -> None:
    choices = np.random.default_rng(vocab_size)
    allowed = np.flatnonzero(choices.random((3, vocab_size))[0] < 0.5).tolist() or [0]
    logits = normal_logits(200, vocab_size)
    rows = [RowParams(seed=i, in_grammar=tuple(allowed)) for i in range(200)]
    tokens = sample(logits, rows)
    assert set(tokens) <= set(allowed)
    greedy = sample(logits, [replace(row, temperature=0.0) for row in rows])
    assert greedy == [allowed[int(np.argmax(row[allowed]))] for row in logits]


def test_masks_are_waited_for_once_and_after_the_other_rows() -> None:
    seen: list[bool] = []

    class LateMasks(ListedMasks):
        def wait(self) -> NDArray[np.int32]:
            seen.append(other_rows_done())
            return super().wait()

    class Spy(Sampler):
        drawn = 0

        def _draw(self, logits: Any, columns: Any, wanted: Any, edit: Any, tokens: Any) -> None:
            super()._draw(logits, columns, wanted, edit, tokens)
            self.drawn += int(wanted.sum())

    spy = Spy()

    def other_rows_done() -> bool:
        return spy.drawn == 3

    rows = [RowParams(in_grammar=(1,)), RowParams(), RowParams(presence=1.0), RowParams(top_k=3), RowParams()]
    columns = make_columns(rows, 50)
    masks = LateMasks(np.array([0, 4], np.int32), [(1,), (2,)], 50)
    tokens, _ = spy(torch.from_numpy(normal_logits(5, 50)), replace(columns, grammar=masks))
    assert seen == [True]
    assert masks.waits == 1
    assert (tokens[0], tokens[4]) == (1, 2)


def test_masks_of_another_vocabulary_are_refused() -> None:
    columns = make_columns([RowParams(in_grammar=(1,))], 50)
    with pytest.raises(ValueError, match="masks must be int32"):
        Sampler()(torch.zeros(1, 65), columns)


# --- Faults ---


@pytest.mark.parametrize(
    "params",
    [
        RowParams(allowed=(3,), bad_words=((3,),)),
        RowParams(allowed=(3,), forbidden=(3,)),
        RowParams(in_grammar=(1, 2), allowed=(3,)),
        RowParams(in_grammar=()),
        RowParams(allowed=(0,), bias=((0, 100.0),)),  # the model itself rules token 0 out
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_nothing_is_left_says_so_and_harms_no_other(params: RowParams, temperature: float) -> None:
    logits = normal_logits(3, 60)
    logits[:, 0] = -np.inf
    others = [RowParams(seed=1, presence=1.0, output=(5,)), RowParams(seed=2)]
    good = sample(logits[[0, 2]], others)
    bad = replace(params, temperature=temperature, num_logprobs=1)
    assert sample(logits, [others[0], bad, others[1]]) == [good[0], NOTHING_ALLOWED, good[1]]


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_edits_do_not_hide_logits_that_are_not_finite(bad: float) -> None:
    logits = normal_logits(2, 60)
    logits[1, 5] = bad
    row = RowParams(allowed=(1, 2), bad_words=((5,),), repetition=1.5, output=(5, 5), in_grammar=(1, 2))
    assert sample(logits, [row, row])[1] == NOT_FINITE
    assert sample(logits, [row, replace(row, in_grammar=())])[1] == NOT_FINITE


# --- Rows keep to themselves ---


def edited_batch(count: int, vocab_size: int) -> list[RowParams]:
    choices = np.random.default_rng(5)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(choices.integers(0, vocab_size, most).tolist())

    kinds = [
        {},
        {"presence": 0.7, "frequency": 0.3},
        {"repetition": 1.3},
        {"allowed": ids(200)},
        {"bias": tuple((token, 3.0) for token in set(ids(5)))},
        {"in_grammar": ids(300), "frequency": 0.1},
        {"bad_words": tuple(ids(2) for _ in range(5)), "repetition": 0.9},
        {"in_grammar": ids(100)},
    ]
    draws: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.02}]
    return [
        RowParams(
            **draws[i % 5],
            **kinds[i % 8],  # type: ignore[arg-type]
            seed=i**5,
            position=i,
            num_logprobs=i % 3 - 1,
            prompt=ids(30),
            output=ids(20),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [700, 33_001])
def test_an_edited_row_gives_the_same_alone_and_among_others(vocab_size: int) -> None:
    rows = edited_batch(40, vocab_size)
    logits = normal_logits(40, vocab_size)
    before = logits.tobytes()
    together = sample(logits, rows)
    assert logits.tobytes() == before
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits[::-1].copy(), rows[::-1])
    assert together == backwards[::-1]


def test_logprobs_stay_those_of_the_raw_logits() -> None:
    logits = normal_logits(1, 50)
    row = RowParams(num_logprobs=3, logprob_ids=(4, 7))
    edited = replace(row, repetition=3.0, bias=((4, 50.0),), output=tuple(range(50)), allowed=(4, 5))
    results = [Sampler()(torch.from_numpy(logits), make_columns([params])) for params in (row, edited)]
    assert results[1][0].tolist() == [4]
    raw = torch.log_softmax(torch.from_numpy(logits[0]), -1).numpy()
    for _, logprobs in results:
        assert logprobs is not None
        assert logprobs.values.tobytes() == raw[logprobs.token_ids].tobytes()
        assert logprobs.token_ids[1:4].tolist() == np.argsort(-logits[0])[:3].tolist()
