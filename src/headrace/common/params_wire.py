"""Parameters between their dataclass and the contract's messages.

`TextOptions` is passed as its fields, since only the gateway's contract has that message.
"""

from google.protobuf.duration_pb2 import Duration

from headrace.common.errors import Violation
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.params import DEFAULT_MAX_TOKENS, RepetitionDetectionParams, SamplingParams
from headrace.common.v1 import params_pb2 as pb


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def duration(seconds_: float) -> Duration:
    """Seconds as a duration."""
    result = Duration()
    result.FromNanoseconds(int(seconds_ * 1e9))
    return result


def sampling_from_wire(message: pb.SamplingParams, defaults: SamplingParams | None = None) -> SamplingParams:
    """What the message asks for; fields that it leaves unset come from `defaults` (text options always do)."""
    base = defaults or SamplingParams()

    def scalar(name: str) -> object:
        return getattr(message, name) if message.HasField(name) else getattr(base, name)  # type: ignore[arg-type]

    limit = message.WhichOneof("limit")
    max_tokens: int | None = base.max_tokens if defaults else DEFAULT_MAX_TOKENS
    if limit == "max_tokens":
        max_tokens = message.max_tokens
    elif limit == "until_context":
        max_tokens = None
    return SamplingParams(
        **{name: scalar(name) for name in _OPTIONAL_SCALARS},  # type: ignore[arg-type]
        max_tokens=max_tokens,
        min_tokens=message.min_tokens or base.min_tokens,
        # Listed once each, in the order given.
        stop_token_ids=tuple(dict.fromkeys((*base.stop_token_ids, *message.stop_token_ids))),
        ignore_eos=message.ignore_eos or base.ignore_eos,
        logprob_token_ids=tuple(dict.fromkeys(message.logprob_token_ids)),
        prompt_logprob_token_ids=tuple(dict.fromkeys(message.prompt_logprob_token_ids)),
        prompt_logprob_start=message.prompt_logprob_start if message.HasField("prompt_logprob_start") else None,
        logit_bias=dict(message.logit_bias) or None,
        allowed_token_ids=tuple(dict.fromkeys(message.allowed_token_ids)) or None,
        structured_outputs=_structured_from_wire(message) if message.HasField("structured_outputs") else None,
        repetition_detection=(
            RepetitionDetectionParams(
                message.repetition_detection.min_pattern_size,
                message.repetition_detection.max_pattern_size,
                message.repetition_detection.min_count,
            )
            if message.HasField("repetition_detection")
            else None
        ),
        skip_reading_prefix_cache=message.skip_reading_prefix_cache,
        time_limit_s=seconds(message.time_limit) if message.HasField("time_limit") else None,
    )


def wire_violations(message: pb.SamplingParams) -> list[Violation]:
    """The rules that a message can break and its `SamplingParams` cannot."""
    if message.WhichOneof("limit") == "until_context" and not message.until_context:
        return [Violation("sampling.until_context", "must be true where it is set")]
    return []


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """The message for parameters; text options stay behind, every scalar is set explicitly."""
    message = pb.SamplingParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprob_token_ids=params.logprob_token_ids,
        prompt_logprob_token_ids=params.prompt_logprob_token_ids,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids or (),
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
    )
    if params.max_tokens is None:
        message.until_context = True
    else:
        message.max_tokens = params.max_tokens
    for name in ("seed", "logprobs", "prompt_logprobs", "prompt_logprob_start"):
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    if params.time_limit_s is not None:
        message.time_limit.CopyFrom(duration(params.time_limit_s))
    if (rule := params.repetition_detection) is not None:
        message.repetition_detection.min_pattern_size = rule.min_pattern_size
        message.repetition_detection.max_pattern_size = rule.max_pattern_size
        message.repetition_detection.min_count = rule.min_count
    if params.structured_outputs is not None:
        _structured_to_wire(params.structured_outputs, message.structured_outputs)
    return message


_OPTIONAL_SCALARS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)


def _structured_from_wire(params: pb.SamplingParams) -> StructuredOutputsParams:
    message = params.structured_outputs
    kind = message.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=message.json_schema if kind == "json_schema" else None,
        json_object=message.json_object if kind == "json_object" else None,
        regex=message.regex if kind == "regex" else None,
        choice=tuple(message.choice.texts) if kind == "choice" else None,
        lark=message.lark if kind == "lark" else None,
        gbnf=message.gbnf if kind == "gbnf" else None,
        structural_tag=message.structural_tag if kind == "structural_tag" else None,
        disable_any_whitespace=message.disable_any_whitespace,
        disable_additional_properties=message.disable_additional_properties,
        whitespace_pattern=message.whitespace_pattern or None,
    )


def _structured_to_wire(params: StructuredOutputsParams, message: pb.StructuredOutputs) -> None:
    for field, value in (
        ("json_schema", params.json),
        ("json_object", params.json_object),
        ("regex", params.regex),
        ("lark", params.lark),
        ("gbnf", params.gbnf),
        ("structural_tag", params.structural_tag),
    ):
        if value is not None:
            setattr(message, field, value)
    if params.choice is not None:
        message.choice.texts.extend(params.choice)
    message.disable_any_whitespace = params.disable_any_whitespace
    message.disable_additional_properties = params.disable_additional_properties
    message.whitespace_pattern = params.whitespace_pattern or ""
