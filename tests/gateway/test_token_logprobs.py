import random

from gateway_harness import model_files
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.core_client import LogprobRow
from headrace.gateway.token_logprobs import PromptLogprobs, token_logprobs
from headrace.gateway.tokenizer import Tokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

TOKENIZER = Tokenizer.from_files(model_files())


def row(token_id: int) -> LogprobRow:
    return LogprobRow([token_id, 0, 1], [-1.0, -2.0, -3.0], [1, 2, 3])


@given(st.integers(1, 40), st.integers(1, 400), st.data(), st.randoms(use_true_random=False))
def test_rows_leave_once_in_order_and_in_bounded_slices(
    num_tokens: int, max_bytes: int, data: st.DataObject, choices: random.Random
) -> None:
    start = data.draw(st.integers(1, max(num_tokens - 1, 1)))
    logprobs = PromptLogprobs(num_tokens, start)
    arrivals = [*range(start, num_tokens), *choices.choices(range(start, num_tokens + 1), k=5)]  # again, or too far
    choices.shuffle(arrivals)
    taken: list[pb.TokenLogprobs] = []
    for position in arrivals:
        logprobs.add(position, row(position))
        if choices.random() < 0.3:
            for slice_ in logprobs.take_slices(TOKENIZER, max_bytes):
                size = pb.GenerateResponse(prompt_logprobs=slice_).ByteSize()
                assert size <= max_bytes or len(slice_) == 1
                taken += slice_
    taken += [message for slice_ in logprobs.take_slices(TOKENIZER) for message in slice_]
    assert logprobs.complete
    assert [[c.token_id for c in message.candidates] for message in taken] == [
        list(dict.fromkeys([position, 0, 1])) if position >= start else [] for position in range(num_tokens)
    ]


def test_a_drawn_token_that_is_among_the_most_likely_stands_once() -> None:
    message = token_logprobs(LogprobRow((7, 3, 7, 9), (-0.5, -0.4, -0.5, -2.0), (2, 1, 2, 3)), TOKENIZER)
    assert [(c.token_id, c.rank) for c in message.candidates] == [(7, 2), (3, 1), (9, 3)]


def test_a_gap_holds_back_what_lies_behind_it() -> None:
    logprobs = PromptLogprobs(4)
    logprobs.add(2, row(2))
    assert [len(slice_) for slice_ in logprobs.take_slices(TOKENIZER)] == [1]
    logprobs.add(1, row(1))
    assert [len(slice_) for slice_ in logprobs.take_slices(TOKENIZER)] == [2]
    assert not logprobs.complete
