"""What a core reads from a request does not depend on what it read before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.params import ModelLimits
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service import admission
from headrace.core_service.admission import AdmissionLimits, read_request

LIMITS = AdmissionLimits(ModelLimits(vocab_size=300, max_model_len=64, max_logprobs=20), max_kv_tokens=64)
LARGER = AdmissionLimits(ModelLimits(vocab_size=70_000, max_model_len=64, max_logprobs=20), max_kv_tokens=64)


def message(sampling=None, **fields):
    request = pb.EngineCoreRequest(internal_id="id", children=[pb.Child()], **({"prompt_token_ids": [1]} | fields))
    request.sampling.CopyFrom(sampling or params_pb2.SamplingParams())
    return request


def read(request, limits=LIMITS):
    """The parameters, or the violations."""
    try:
        return read_request(request, 1, limits, 0.0).params
    except InvalidRequest as error:
        return error.violations


SAMPLINGS = st.builds(
    params_pb2.SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1, 3]),
    top_p=st.sampled_from([0.5, 1, 2]),
    logprobs=st.sampled_from([-1, 0, 5, 21]),
    logit_bias=st.dictionaries(st.sampled_from([0, 7, 299, 300]), st.just(1.0), max_size=2),
    stop_token_ids=st.lists(st.sampled_from([0, 299, 300]), max_size=500),
)


@given(st.lists(SAMPLINGS, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=8))
def test_parameters_are_read_alike_whether_or_not_they_are_remembered(samplings, order):
    fresh = []
    for sampling in samplings:
        admission._remembered_sampling.cache_clear()
        fresh.append(read(message(sampling)))
    for index in order:
        assert read(message(samplings[index % len(samplings)])) == fresh[index % len(samplings)]


def test_what_one_model_allows_is_not_remembered_for_another():
    sampling = params_pb2.SamplingParams(stop_token_ids=[300])
    assert read(message(sampling), LARGER).stop_token_ids == (300,)
    (violation,) = read(message(sampling))
    assert violation.field.startswith("sampling.stop_token_ids")


def test_only_short_parameters_are_remembered():
    admission._remembered_sampling.cache_clear()
    read(message(params_pb2.SamplingParams(allowed_token_ids=range(299))))
    assert admission._remembered_sampling.cache_info().currsize == 1
    read(message(params_pb2.SamplingParams(allowed_token_ids=[299] * 2000)))
    assert admission._remembered_sampling.cache_info().currsize == 1


@pytest.mark.parametrize("field", ["prompt_token_ids", "eos_token_ids"])
@pytest.mark.parametrize("bad", [300, 2**31, 2**32 - 1])
def test_the_first_id_outside_the_vocabulary_is_named(field, bad):
    (violation,) = read(message(**{field: [0, 299, bad, 2**32 - 1]}))
    assert violation == Violation(f"{field}[2]", f"must be between 0 and 299; got {bad}")


def test_a_resumed_request_is_known_as_one():
    for resumes in (0, 1, 5):
        assert read_request(message(resumes=resumes), 1, LIMITS, 0.0).resumed == (resumes > 0)
