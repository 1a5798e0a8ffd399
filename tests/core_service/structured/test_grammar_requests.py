"""What the core reads of a constrained request, checked again: it trusts no gateway."""

import pytest

from headrace.common.errors import InvalidRequest
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.params import ModelLimits
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.admission import MAX_GRAMMAR_AFTER, AdmissionLimits, read_request

LIMITS = AdmissionLimits(ModelLimits(vocab_size=100, max_model_len=50, max_logprobs=5), max_kv_tokens=1000)


def read(structured=None, after=None):
    message = pb.EngineCoreRequest(internal_id="a", prompt_token_ids=[1, 2], children=[pb.Child(index=0)])
    if structured is not None:
        message.sampling.structured_outputs.CopyFrom(params_pb2.StructuredOutputs(**structured))
    if after is not None:
        message.grammar_after.token_ids.extend(after)
        message.grammar_after.SetInParent()
    return read_request(message, 1, LIMITS, 0.0)


def violated(**message):
    with pytest.raises(InvalidRequest) as caught:
        read(**message)
    return {violation.field for violation in caught.value.violations}


def test_a_constraint_and_the_ids_before_it_are_read():
    request = read({"regex": "a+"}, after=[7, 8])
    assert request.params.structured_outputs == StructuredOutputsParams(regex="a+")
    assert request.grammar_after == (7, 8)
    assert read({"json_object": True}).grammar_after == ()


def test_a_bad_constraint_is_refused_by_its_field():
    assert violated(structured={"json_object": False}) == {"sampling.structured_outputs.json_object"}
    assert violated(structured={}) == {"sampling.structured_outputs"}


def test_ids_before_a_grammar_must_be_in_the_vocabulary_few_and_before_a_grammar():
    assert violated(structured={"regex": "a"}, after=[100]) == {"grammar_after.token_ids[0]"}
    assert violated(structured={"regex": "a"}, after=[1] * (MAX_GRAMMAR_AFTER + 1)) == {"grammar_after.token_ids"}
    assert violated(after=[1]) == {"grammar_after"}
