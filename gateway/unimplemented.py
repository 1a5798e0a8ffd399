"""What the public contract offers and this release does not do yet.

This is the only list: to build a feature, delete its line.

A request that asks for any of it is refused with UNIMPLEMENTED and the names; nothing is ignored.
"""

from collections.abc import Callable

from headrace.common.errors import Unimplemented
from headrace.gateway_api.v1 import generation_pb2 as pb

_GENERATE_FEATURES: dict[str, Callable[[pb.GenerateRequest], bool]] = {
    "sampling.thinking_token_budget": lambda r: r.sampling.HasField("thinking_token_budget"),
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


def unimplemented_call(name: str) -> Unimplemented:
    """The error of a whole call that is not built."""
    return Unimplemented(f"{name} is not built in this release")


def _refuse(names: list[str]) -> None:
    if names:
        raise Unimplemented(f"not built in this release: {', '.join(names)}")
