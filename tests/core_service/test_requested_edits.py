"""Which edits a request gets, and which bad words a core refuses."""

import numpy as np
import pytest

from headrace.common.errors import InvalidRequest
from headrace.common.params import ModelLimits, SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import AdmissionLimits, read_request
from headrace.core_service.requested_edits import requested_edits

LIMITS = AdmissionLimits(ModelLimits(vocab_size=100, max_model_len=50, max_logprobs=5), max_kv_tokens=1000)


def read(bad_words=(), **sampling):
    message = pb.EngineCoreRequest(
        prompt_token_ids=[1, 2, 3],
        children=[pb.Child()],
        bad_word_ids=[pb.TokenSequence(token_ids=ids) for ids in bad_words],
    )
    logit_bias = sampling.pop("logit_bias", {})
    for name, value in sampling.items():
        if isinstance(value, list):
            getattr(message.sampling, name).extend(value)
        else:
            setattr(message.sampling, name, value)
    message.sampling.logit_bias.update(logit_bias)
    return read_request(message, 1, LIMITS, 0.0)


@pytest.mark.parametrize(
    "neutral", [{}, {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}, {"logit_bias": {}}]
)
def test_a_request_that_changes_no_logits_has_no_edits(neutral):
    assert read(**neutral).edits is None


@pytest.mark.parametrize(
    ("asked", "needs_history"),
    [
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.5}, True),
        ({"bad_words": [[5]]}, True),
        ({"logit_bias": {1: 0.5}}, False),
        ({"allowed_token_ids": [1]}, False),
    ],
    ids=str,
)
def test_only_edits_that_look_at_the_tokens_before_need_them(asked, needs_history):
    edits = read(**asked).edits
    assert edits is not None
    assert edits.need_history == needs_history


def test_edits_hold_what_was_asked_for():
    edits = read(
        bad_words=[[7], [8, 9]],
        allowed_token_ids=[5, 4, 5],
        logit_bias={3: 1000.0, 2: -0.5},
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=2.0,
    ).edits
    assert edits is not None
    assert edits.allowed_ids is not None
    assert edits.allowed_ids.tolist() == [5, 4]
    assert [word.tolist() for word in edits.bad_words] == [[7], [8, 9]]
    assert dict(zip(edits.bias_ids.tolist(), edits.bias_values.tolist(), strict=True)) == {3: 100.0, 2: -0.5}
    assert (edits.presence_penalty, edits.frequency_penalty, edits.repetition_penalty) == (0.25, 0.5, 2.0)
    for array in (edits.allowed_ids, *edits.bad_words, edits.bias_ids):
        assert array.dtype == np.int32
    assert edits.bias_values.dtype == np.float32


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([[]], {"bad_word_ids[0]": "0"}),
        ([[1], [2, 100]], {"bad_word_ids[1]": "100"}),
        ([[1] * 1025], {"bad_word_ids[0]": "1025"}),
        ([[1]] * 129, {"bad_word_ids": "129"}),
        ([[1], [], [99, 100]], {"bad_word_ids[1]": "0", "bad_word_ids[2]": "100"}),
    ],
    ids=["empty", "id outside", "too long", "too many", "several"],
)
def test_bad_words_that_break_a_rule_are_named(words, named):
    with pytest.raises(InvalidRequest) as refusal:
        read(bad_words=words)
    found = {violation.field: violation.description for violation in refusal.value.violations}
    assert list(found) == list(named)
    assert all(value in found[field] for field, value in named.items())


def test_the_most_and_longest_bad_words_are_taken():
    edits = read(bad_words=[[99] * 1024, *[[i % 100] for i in range(127)]]).edits
    assert edits is not None
    assert len(edits.bad_words) == 128


@pytest.mark.parametrize(("start", "first"), [(None, 1), (0, 1), (1, 1), (2, 2)])
def test_prompt_logprobs_begin_where_they_are_asked_to(start, first):
    asked = {} if start is None else {"prompt_logprob_start": start}
    assert read(prompt_logprob_token_ids=[4], **asked).prompt_logprobs_sent == first


def test_parameters_without_edits_make_no_record():
    assert requested_edits(SamplingParams(), ()) is None
