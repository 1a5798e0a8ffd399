"""A completion turns any sequence of ids into messages that add up, whenever they are taken."""

import functools

import pytest
from gateway_harness import EOS, model_files
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.errors import InternalError, Unavailable
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.completion import Completion, CompletionOptions
from headrace.gateway.core_client import LogprobRow
from headrace.gateway.output_text import OutputText
from headrace.gateway.tokenizer import Tokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

TOKENIZER = Tokenizer.from_files(model_files())
LENGTH = core_pb.Finished(reason=params_pb2.FINISH_REASON_LENGTH)


def make_completion(
    stops: tuple[str, ...] = (), *, logprobs: bool = False, keep_all: bool = False, min_new_tokens: int = 1
) -> tuple[Completion, list[str]]:
    events: list[str] = []
    options = CompletionOptions(
        text=functools.partial(OutputText, TOKENIZER, stops=stops),
        tokenizer=TOKENIZER,
        stop_token_ids=frozenset({EOS}),
        logprobs=logprobs,
        keep_all=keep_all,
        min_new_tokens=min_new_tokens,
    )
    completion = Completion(0, 7, options, None, lambda _c: events.append("news"), lambda _c: events.append("stop"))
    return completion, events


def row(token_id: int) -> LogprobRow:
    return LogprobRow([token_id], [-0.25], [1])


def drain(completion: Completion) -> list[pb.CompletionOutput]:
    return [take(completion)] if completion.has_news() else []


def take(completion: Completion) -> pb.CompletionOutput:
    output = pb.CompletionOutput()
    completion.take(output)
    return output


def test_repeating_all_logprobs_costs_no_square_of_the_length() -> None:
    completion, _ = make_completion(logprobs=True, keep_all=True)
    candidates = 0
    for position in range(4000):
        completion.on_logprobs(position, row(97))
        completion.on_tokens([97])
        candidates += sum(len(output.logprobs) for output in drain(completion))
    completion.on_finished(LENGTH)
    assert [len(output.logprobs) for output in drain(completion)] == [4000]
    assert candidates < 4000 * 64


@given(
    st.lists(st.tuples(st.binary(max_size=4), st.booleans()), max_size=12),
    st.sampled_from([(), ("b",), ("ab", "ca"), ("€",)]),
    st.booleans(),
    st.integers(1, 5),
)
def test_joined_messages_equal_what_one_reader_at_the_end_gets(
    steps: list[tuple[bytes, bool]], stops: tuple[str, ...], logprobs: bool, min_new_tokens: int
) -> None:
    streamed, _ = make_completion(stops, logprobs=logprobs, min_new_tokens=min_new_tokens)
    whole, _ = make_completion(stops, logprobs=logprobs, keep_all=True)
    taken: list[pb.CompletionOutput] = []
    position = 0
    for ids, read in steps:
        for completion in (streamed, whole):
            for offset, token_id in enumerate(ids):
                if logprobs:
                    completion.on_logprobs(position + offset, row(token_id))
            if ids:
                completion.on_tokens(list(ids))
        position += len(ids)
        if read:
            taken += drain(streamed)
    for completion in (streamed, whole):
        completion.on_finished(LENGTH)
        assert completion.complete
    taken += drain(streamed)
    (final,) = drain(whole)
    assert "".join(o.text for o in taken) == final.text
    assert [t for o in taken for t in o.token_ids] == list(final.token_ids)
    assert [r for o in taken for r in o.logprobs] == list(final.logprobs)
    assert taken[-1].finish_reason == final.finish_reason
    assert taken[-1].stop_text == final.stop_text
    assert taken[-1].cumulative_logprob == final.cumulative_logprob
    assert [o.HasField("seed") for o in taken] == [True] + [False] * (len(taken) - 1)
    offsets = [o.token_offset for o in taken]
    assert offsets == [sum(len(o.token_ids) for o in taken[:i]) for i in range(len(taken))]


def test_tokens_after_a_stop_string_are_ignored_until_the_terminal_row() -> None:
    completion, events = make_completion(("b",))
    completion.on_tokens(list(b"abc"))
    assert events.count("stop") == 1
    completion.on_tokens(list(b"def"))
    assert not completion.over
    assert not completion.complete
    output = take(completion)
    assert (output.text, bytes(output.token_ids), output.stop_text) == ("a", b"ab", "b")
    completion.on_finished(core_pb.Finished(reason=params_pb2.FINISH_REASON_ABORT, code=1))
    assert completion.complete
    assert completion.error is None
    assert completion.finish_reason == params_pb2.FINISH_REASON_STOP
    assert not completion.has_news()


def test_an_end_without_new_tokens_comes_alone() -> None:
    completion, _ = make_completion(logprobs=True)
    completion.on_logprobs(0, row(97))
    completion.on_tokens([97])
    take(completion)
    completion.on_finished(LENGTH)
    (output,) = drain(completion)
    assert (output.text, list(output.token_ids), list(output.logprobs)) == ("", [], [])
    assert (output.token_offset, output.finish_reason) == (1, params_pb2.FINISH_REASON_LENGTH)
    assert output.cumulative_logprob == -0.25


def test_output_waits_for_its_logprobs() -> None:
    completion, _ = make_completion(logprobs=True)
    completion.on_tokens(list(b"ab"))
    completion.on_finished(LENGTH)
    assert not completion.has_news()
    assert not completion.complete
    completion.on_logprobs(1, row(98))
    assert not completion.has_news()
    completion.on_logprobs(0, row(97))
    assert completion.complete
    assert take(completion).cumulative_logprob == -0.5


@pytest.mark.parametrize("waits", [False, True])
def test_lost_logprobs_fail_only_who_waits_for_them(waits: bool) -> None:
    completion, events = make_completion(logprobs=waits)
    completion.on_tokens(list(b"ab"))
    completion.on_logprobs_lost(Unavailable("gone"))
    assert (completion.error is not None) == waits
    assert events.count("stop") == waits


def test_a_lost_core_fails_what_is_unfinished() -> None:
    completion, _ = make_completion()
    completion.on_tokens(list(b"ab"))
    completion.on_failed(Unavailable("gone"))
    assert isinstance(completion.error, Unavailable)
    assert take(completion).text == "ab"


def test_the_first_message_does_not_wait_for_the_interval() -> None:
    completion, _ = make_completion(min_new_tokens=3)
    completion.on_tokens([97])
    assert completion.has_news()
    take(completion)
    completion.on_tokens([98, 99])
    assert not completion.has_news()
    completion.on_tokens([100])
    assert take(completion).text == "bcd"


@pytest.mark.parametrize("reason", [params_pb2.FINISH_REASON_UNSPECIFIED, 99])
def test_an_end_for_no_known_reason_is_no_success(reason: params_pb2.FinishReason.ValueType) -> None:
    completion, _ = make_completion()
    completion.on_tokens([97])
    completion.on_finished(core_pb.Finished(reason=reason))
    assert isinstance(completion.error, InternalError)
    assert take(completion).finish_reason == params_pb2.FINISH_REASON_ERROR
