"""Every rule of the sampling parameters, just inside and just outside, in the gateway and in the core alike."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_harness import VOCAB_SIZE, model_files
from google.protobuf.json_format import ParseDict

from headrace.common.errors import InvalidRequest
from headrace.common.params import ModelLimits, RepetitionDetectionParams, SamplingParams
from headrace.common.params_wire import sampling_from_wire, sampling_to_wire
from headrace.common.v1 import params_pb2 as pb
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.core_service.admission import AdmissionLimits, read_request
from headrace.gateway.fakes import fake_core_info
from headrace.gateway.input_processor import Arrival, InputProcessor, PreparedRequest
from headrace.gateway.served_model import ServedModel
from headrace.gateway.text_tools import TextTools
from headrace.gateway_api.v1 import generation_pb2

PROMPT = list(b"abcde")
LIMITS = ModelLimits(vocab_size=VOCAB_SIZE, max_model_len=512, max_logprobs=20)
LAST = VOCAB_SIZE - 1
NAN, INFINITY = "NaN", "Infinity"


@dataclass(frozen=True)
class Rule:
    """JSON values of one field that are taken, and those that are refused under the field's name or `named`."""

    field: str
    inside: tuple[Any, ...]
    outside: tuple[Any, ...] = ()
    named: str = ""


def repetition(smallest: int, largest: int, count: int) -> dict[str, int]:
    return {"minPatternSize": smallest, "maxPatternSize": largest, "minCount": count}


TINY = 1e-45  # the smallest float32 above 0
RULES = (
    Rule("n", (1, 16_384), (0, 16_385)),
    Rule("temperature", (0, TINY, 2), (-TINY, 2.0000002, NAN, INFINITY)),
    Rule("top_p", (TINY, 1), (0, 1.0000001, -1, NAN)),
    Rule("top_k", (-1, 0, 1, 2**31 - 1), (-2, -(2**31))),
    Rule("min_p", (0, 1), (-TINY, 1.0000001, NAN)),
    Rule("seed", (0, 2**64 - 1)),
    Rule("presence_penalty", (-2, 0, 2), (-2.0000002, 2.0000002, NAN)),
    Rule("frequency_penalty", (-2, 0, 2), (-2.0000002, 2.0000002, NAN)),
    Rule("repetition_penalty", (TINY, 1, 3e38), (0, -1, NAN, INFINITY)),
    Rule("max_tokens", (1, 2**32 - 1), (0,)),
    Rule("until_context", (True,), (False,)),
    Rule("min_tokens", (0, 16), (17, 2**32 - 1)),
    Rule("stop_token_ids", ([], [0, LAST], list(range(256))), ([VOCAB_SIZE], [0, 2**32 - 1], list(range(257)))),
    Rule("ignore_eos", (False, True)),
    Rule("logprobs", (0, 20), (-1, -2, 21)),
    Rule("prompt_logprobs", (0, 20), (-1, -2, 21)),
    Rule("logprob_token_ids", ([], [0, LAST], list(range(128))), ([VOCAB_SIZE], list(range(129)))),
    Rule("logit_bias", ({}, {0: 1, LAST: -3e38}), ({VOCAB_SIZE: 1},)),
    Rule("logit_bias", ({0: 100},), ({0: NAN}, {0: INFINITY}), "logit_bias[0]"),
    Rule("allowed_token_ids", ([], [0, LAST], list(range(VOCAB_SIZE))), ([VOCAB_SIZE],)),
    Rule("skip_reading_prefix_cache", (False, True)),
    Rule("time_limit", ("0.000000001s", "1000000000s"), ("0s", "-1s", "1000000001s")),
    Rule("prompt_logprob_token_ids", ([], [0, LAST], list(range(128))), ([VOCAB_SIZE], list(range(129)))),
    Rule("prompt_logprob_start", (0, 1, len(PROMPT) - 1), (len(PROMPT), 2**32 - 1)),
    Rule("repetition_detection", (repetition(1, 2048, 2), repetition(2048, 2048, 2)), (repetition(1, 2049, 2),)),
    Rule("repetition_detection", (), (repetition(0, 1, 2),), "repetition_detection.min_pattern_size"),
    Rule("repetition_detection", (), (repetition(3, 2, 2),), "repetition_detection.max_pattern_size"),
    Rule("repetition_detection", (repetition(1, 1, 4096),), (repetition(1, 1, 1),), "repetition_detection.min_count"),
)
# Not built, so refused whatever they say; and what has tests of its own.
ELSEWHERE = {"thinking_token_budget", "structured_outputs"}


def message(field: str, value: Any) -> pb.SamplingParams:
    return ParseDict({field: value}, pb.SamplingParams())


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    files = model_files()
    tools = TextTools.from_files(files)
    yield ServedModel("fake", fake_core_info(files), LIMITS, SamplingParams(), tools, 1 << 20)
    tools.close()


def to_gateway(sampling: pb.SamplingParams, model: ServedModel) -> PreparedRequest:
    prompt = generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=PROMPT))
    request = generation_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(InputProcessor(pool, "epoch").prepare(request, "id", model, Arrival.now(None)))


def to_core(request: core_pb.EngineCoreRequest) -> SamplingParams:
    return read_request(request, 1, AdmissionLimits(LIMITS, max_kv_tokens=1000), 0.0).params


INSIDE = [(rule.field, value) for rule in RULES for value in rule.inside]
OUTSIDE = [(rule.field, value, f"sampling.{rule.named or rule.field}") for rule in RULES for value in rule.outside]


def short(value: Any) -> str | None:
    return f"{str(value)[:20]}..." if len(str(value)) > 20 else None


@pytest.mark.parametrize(("field", "value"), INSIDE, ids=short)
def test_what_keeps_the_rules_is_taken_by_both(field: str, value: Any, model: ServedModel) -> None:
    sampling = message(field, value)
    to_core(core_pb.EngineCoreRequest(prompt_token_ids=PROMPT, sampling=sampling, children=[core_pb.Child()]))
    to_core(to_gateway(sampling, model).engine_request)


@pytest.mark.parametrize(("field", "value", "named"), OUTSIDE, ids=short)
def test_what_breaks_a_rule_is_named_by_both(field: str, value: Any, named: str, model: ServedModel) -> None:
    sampling = message(field, value)
    with pytest.raises(InvalidRequest) as of_gateway:
        to_gateway(sampling, model)
    with pytest.raises(InvalidRequest) as of_core:
        to_core(core_pb.EngineCoreRequest(prompt_token_ids=PROMPT, sampling=sampling, children=[core_pb.Child()]))
    assert [violation.field for violation in of_gateway.value.violations] == [named]
    assert of_gateway.value.violations == of_core.value.violations


def test_every_field_has_a_rule() -> None:
    assert {rule.field for rule in RULES} | ELSEWHERE == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("params", "taken", "named"),
    [
        (SamplingParams(logprobs=-1, prompt_logprobs=-1), replace(LIMITS, max_logprobs=VOCAB_SIZE), []),
        (SamplingParams(allowed_token_ids=()), LIMITS, ["sampling.allowed_token_ids"]),
        (SamplingParams(prompt_logprob_start=-1), LIMITS, ["sampling.prompt_logprob_start"]),
        (SamplingParams(max_tokens=None, min_tokens=512), LIMITS, []),
        (SamplingParams(max_tokens=None, min_tokens=513), LIMITS, ["sampling.min_tokens"]),
        (SamplingParams(n=2, temperature=0), LIMITS, []),
        (SamplingParams(stop=("x",), detokenize=False), LIMITS, ["text_options.stop"]),
    ],
    ids=[
        "the whole vocabulary where that is allowed",
        "nothing allowed",
        "a start before the prompt",
        "min_tokens up to the context's end",
        "min_tokens past the context's end",
        "several greedy completions",
        "stop strings without text",
    ],
)
def test_rules_that_no_single_field_of_the_contract_shows(
    params: SamplingParams, taken: ModelLimits, named: list[str]
) -> None:
    assert [violation.field for violation in params.violations(taken)] == named


def test_parameters_come_back_from_the_wire_as_they_were() -> None:
    params = SamplingParams(
        n=3,
        seed=2**64 - 1,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        max_tokens=None,
        stop_token_ids=(4, 2),
        logprobs=0,
        prompt_logprobs=2,
        logprob_token_ids=(9, 8),
        prompt_logprob_token_ids=(7, 6),
        prompt_logprob_start=3,
        logit_bias={5: -1.5},
        allowed_token_ids=(5, 3),
        repetition_detection=RepetitionDetectionParams(1, 2, 3),
        time_limit_s=1.5,
    )
    assert sampling_from_wire(sampling_to_wire(params)) == params


def test_who_asks_for_some_ids_gets_those_of_the_token_itself_too() -> None:
    params = SamplingParams(logprob_token_ids=(1,), prompt_logprob_token_ids=(2,)).normalized()
    assert (params.logprobs, params.prompt_logprobs) == (0, 0)
    params = SamplingParams(logprobs=3, prompt_logprobs=4, logprob_token_ids=(1,)).normalized()
    assert (params.logprobs, params.prompt_logprobs) == (3, 4)
    assert SamplingParams().normalized().logprobs is None


def test_biases_are_clamped() -> None:
    assert SamplingParams(logit_bias={1: 3e38, 2: -101.0, 3: 99.5}).normalized().logit_bias == {
        1: 100.0,
        2: -100.0,
        3: 99.5,
    }
