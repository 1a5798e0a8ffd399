"""What the public contract offers and this release does not do yet.

This is the only list: to build a feature, delete its line.

A request that asks for any of it is refused with UNIMPLEMENTED and the names; nothing is ignored.
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.common.errors import Unimplemented
from headrace.common.params import SamplingParams
from headrace.gateway_api.v1 import generation_pb2 as pb

_GENERATE_FEATURES: dict[str, Callable[[pb.GenerateRequest], bool]] = {
    "sampling.presence_penalty": lambda r: r.sampling.presence_penalty != 0,
    "sampling.frequency_penalty": lambda r: r.sampling.frequency_penalty != 0,
    "sampling.repetition_penalty": lambda r: (
        r.sampling.HasField("repetition_penalty") and r.sampling.repetition_penalty != 1
    ),
    "sampling.logit_bias": lambda r: bool(r.sampling.logit_bias),
    "sampling.allowed_token_ids": lambda r: bool(r.sampling.allowed_token_ids),
    "sampling.structured_outputs": lambda r: r.sampling.HasField("structured_outputs"),
    "sampling.repetition_detection": lambda r: r.sampling.HasField("repetition_detection"),
    "sampling.thinking_token_budget": lambda r: r.sampling.HasField("thinking_token_budget"),
    "sampling.prompt_logprob_token_ids": lambda r: bool(r.sampling.prompt_logprob_token_ids),
    "sampling.prompt_logprob_start": lambda r: r.sampling.HasField("prompt_logprob_start"),
    "text_options.bad_words": lambda r: bool(r.text_options.bad_words),
    "adapter": lambda r: bool(r.adapter),
    "resume": lambda r: r.HasField("resume"),
    "data_parallel_rank": lambda r: r.HasField("data_parallel_rank"),
}

_PROMPT_FEATURES: dict[str, Callable[[pb.Prompt], bool]] = {
    "prompt.embeds": lambda p: p.WhichOneof("form") == "embeds",
    "prompt.media": lambda p: bool(p.media),
    "prompt.chat.messages.parts.media": lambda p: any(
        part.WhichOneof("part") == "media" for message in p.chat.messages for part in message.parts
    ),
}


def refuse_unimplemented_generate(request: pb.GenerateRequest) -> None:
    """Raises Unimplemented, naming every field that asks for something that is not built."""
    _refuse(
        [name for name, asked in _PROMPT_FEATURES.items() if asked(request.prompt)]
        + [name for name, asked in _GENERATE_FEATURES.items() if asked(request)]
    )


def refuse_unimplemented_prompt(prompt: pb.Prompt) -> None:
    """The same for a prompt that is only tokenized."""
    _refuse([name for name, asked in _PROMPT_FEATURES.items() if asked(prompt)])


def built_defaults(defaults: SamplingParams) -> tuple[SamplingParams, list[str]]:
    """A model's default parameters without what is not built, and the names of what was dropped.

    A model's author may recommend a penalty; a client that did not ask for it must still be served.
    """
    plain = SamplingParams()
    unbuilt = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    dropped = [name for name in unbuilt if getattr(defaults, name) != getattr(plain, name)]
    kept = replace(
        defaults,
        presence_penalty=plain.presence_penalty,
        frequency_penalty=plain.frequency_penalty,
        repetition_penalty=plain.repetition_penalty,
    )
    return kept, dropped


def unimplemented_call(name: str) -> Unimplemented:
    """The error of a whole call that is not built."""
    return Unimplemented(f"{name} is not built in this release")


def _refuse(names: list[str]) -> None:
    if names:
        raise Unimplemented(f"not built in this release: {', '.join(names)}")
