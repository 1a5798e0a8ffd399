"""The rules of a request that can be checked without a tokenizer; every one that is broken is named."""

import json
from collections.abc import Sequence

from headrace.common.errors import Violation
from headrace.common.params import SamplingParams
from headrace.common.params_wire import sampling_from_wire, wire_violations
from headrace.gateway.served_model import ServedModel
from headrace.gateway.unknown_fields import unknown_fields
from headrace.gateway_api.v1 import generation_pb2 as pb

CHAT_ROLES = ("system", "user", "assistant", "tool")
MAX_STOP_STRINGS = 256
MAX_STOP_BYTES = 4096
MAX_BAD_WORD_BYTES = 1024
MAX_NAME_BYTES = 256  # of request_id, session_id and cache_salt
# Messages inside a request, each of which costs some microseconds on the event loop that all streams share.
MAX_ITEMS = 16_384


def sampling_params(request: pb.GenerateRequest, model: ServedModel) -> SamplingParams:
    """The request's parameters over the model's defaults, text options included; not checked yet."""
    text = request.text_options
    plain = sampling_from_wire(request.sampling, model.default_sampling)
    values = {
        "stop": tuple(text.stop),
        "include_stop_str_in_output": text.include_stop_in_output,
        "bad_words": tuple(text.bad_words),
    }
    for name in ("skip_special_tokens", "detokenize", "truncate_prompt_tokens", "spaces_between_special_tokens"):
        if text.HasField(name):
            values[name] = getattr(text, name)
    return SamplingParams(**({name: getattr(plain, name) for name in plain.__slots__} | values))


def generate_violations(request: pb.GenerateRequest, params: SamplingParams, model: ServedModel) -> list[Violation]:
    """Every broken rule of a Generate request, apart from the prompt's length in tokens."""
    if found := crowd_violations(request.prompt):
        return found
    if (points := len(request.resume.completions)) > MAX_ITEMS:
        return [Violation("resume.completions", f"at most {MAX_ITEMS} items; got {points}")]
    found = unknown_fields(request) + wire_violations(request.sampling)
    found += params.violations(model.limits)
    found += prompt_violations(request.prompt, model, truncates=params.truncate_prompt_tokens is not None)
    found += _text_violations(request)
    if request.HasField("stream_interval") and request.stream_interval < 1:
        found.append(Violation("stream_interval", "must be at least 1; got 0"))
    for name in ("request_id", "session_id", "cache_salt"):
        if (size := len(getattr(request, name).encode())) > MAX_NAME_BYTES:
            found.append(Violation(name, f"must be at most {MAX_NAME_BYTES} bytes; got {size}"))
    return found


def crowd_violations(prompt: pb.Prompt) -> list[Violation]:
    """A prompt of so many pieces that looking at each would hold up everybody else."""
    messages, tools = len(prompt.chat.messages), len(prompt.chat.tools)
    counts = {"prompt.media": len(prompt.media), "prompt.chat.messages": messages, "prompt.chat.tools": tools}
    if messages <= MAX_ITEMS:
        parts = sum(len(message.parts) + len(message.tool_calls) for message in prompt.chat.messages)
        counts["prompt.chat.messages.parts and tool_calls"] = parts
    return [
        Violation(field, f"at most {MAX_ITEMS} items; got {count}")
        for field, count in counts.items()
        if count > MAX_ITEMS
    ]


def prompt_violations(prompt: pb.Prompt, model: ServedModel, *, truncates: bool) -> list[Violation]:
    """Every broken rule of a prompt that shows before it is tokenized."""
    form = prompt.WhichOneof("form")
    if form is None:
        return [Violation("prompt", "must be set: text, token_ids or chat")]
    if form == "text":
        if not prompt.text:
            return [Violation("prompt.text", "must not be empty")]
        return text_size_violations("prompt.text", prompt.text, model, truncates=truncates)
    if form == "token_ids":
        return _token_id_violations(prompt.token_ids.ids, model)
    if form == "chat":
        return _chat_violations(prompt.chat, model) or text_size_violations(
            "prompt.chat", "".join(message.content for message in prompt.chat.messages), model, truncates=truncates
        )
    return []  # embeddings are not built; their refusal names them


def text_size_violations(field: str, text: str, model: ServedModel, *, truncates: bool) -> list[Violation]:
    """A text too long to be worth tokenizing."""
    limit, size = model.max_prompt_bytes(truncates=truncates), len(text.encode())
    if size <= limit:
        return []
    return [
        Violation(
            field,
            f"must be at most {limit} bytes (max_model_len is {model.limits.max_model_len} tokens, the server takes "
            f"{model.max_text_bytes} bytes); got {size}",
        )
    ]


def prompt_length_violations(
    field: str, num_tokens: int, params: SamplingParams, model: ServedModel
) -> list[Violation]:
    """A prompt that is empty, leaves no room for a single output token, or is too short for what is asked of it."""
    longest = model.limits.max_model_len - 1
    if num_tokens == 0:
        return [Violation(field, "must be at least one token; got none")]
    if num_tokens <= longest:
        return params.prompt_violations(num_tokens)
    wanted = "up to the context's end" if params.max_tokens is None else f"{params.max_tokens}"
    return [
        Violation(
            field,
            f"must leave room for at least one output token: the prompt has {num_tokens} tokens, max_model_len is "
            f"{model.limits.max_model_len}, max_tokens is {wanted}",
        )
    ]


def _token_id_violations(ids: Sequence[int], model: ServedModel) -> list[Violation]:
    if not ids:
        return [Violation("prompt.token_ids.ids", "must not be empty")]
    limit = model.limits.vocab_size
    if max(ids) < limit:
        return []
    bad = [(position, token_id) for position, token_id in enumerate(ids) if token_id >= limit]
    return [
        Violation(f"prompt.token_ids.ids[{position}]", f"must be between 0 and {limit - 1}; got {token_id}")
        for position, token_id in bad[:5]
    ]


def _chat_violations(chat: pb.Chat, model: ServedModel) -> list[Violation]:
    found: list[Violation] = []
    if model.chat_template is None:
        found.append(Violation("prompt.chat", f"model {model.name} has no chat template"))
    if not chat.messages:
        found.append(Violation("prompt.chat.messages", "must not be empty"))
    for position, message in enumerate(chat.messages):
        place = f"prompt.chat.messages[{position}]"
        if message.role not in CHAT_ROLES:
            found.append(Violation(f"{place}.role", f"must be one of {', '.join(CHAT_ROLES)}; got {message.role!r}"))
        if message.content and message.parts:
            found.append(Violation(f"{place}.parts", "must be empty where content is set"))
        for number, part in enumerate(message.parts):
            if part.WhichOneof("part") is None:
                found.append(Violation(f"{place}.parts[{number}]", "must be text or media; it is empty"))
        for number, call in enumerate(message.tool_calls):
            found += _json_object_violations(f"{place}.tool_calls[{number}]", call)
    for position, tool in enumerate(chat.tools):
        found += _json_object_violations(f"prompt.chat.tools[{position}]", tool)
    if chat.template_variables:
        found += _json_object_violations("prompt.chat.template_variables", chat.template_variables)
    if chat.continue_final_message and chat.add_generation_prompt:
        found.append(Violation("prompt.chat.continue_final_message", "must not be true where add_generation_prompt is"))
    return found


def _json_object_violations(field: str, text: str) -> list[Violation]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Violation(field, f"must be a JSON object; {error}")]
    return [] if isinstance(value, dict) else [Violation(field, f"must be a JSON object; got {type(value).__name__}")]


def _text_violations(request: pb.GenerateRequest) -> list[Violation]:
    stop = request.text_options.stop
    found = []
    if len(stop) > MAX_STOP_STRINGS:
        found.append(Violation("text_options.stop", f"at most {MAX_STOP_STRINGS} strings; got {len(stop)}"))
    longest = max((len(text.encode()) for text in stop), default=0)
    if longest > MAX_STOP_BYTES:
        found.append(Violation("text_options.stop", f"strings of at most {MAX_STOP_BYTES} bytes; got one of {longest}"))
    longest = max((len(word.encode()) for word in request.text_options.bad_words), default=0)
    if longest > MAX_BAD_WORD_BYTES:
        field = "text_options.bad_words"
        found.append(Violation(field, f"words of at most {MAX_BAD_WORD_BYTES} bytes; got one of {longest}"))
    return found
