"""Turns a public request into the one that a core takes: chat to text, text to ids, parameters to their final values.

Rendering and tokenizing run on a thread pool, so that a long prompt never holds up the streams of others.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.params import SamplingParams
from headrace.common.params_wire import duration, sampling_to_wire
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.bad_words import BadWords, bad_word_sequences
from headrace.gateway.served_model import ServedModel
from headrace.gateway.unimplemented import refuse_unimplemented_generate, refuse_unimplemented_prompt
from headrace.gateway.unknown_fields import unknown_fields
from headrace.gateway.validation import (
    crowd_violations,
    generate_violations,
    prompt_length_violations,
    prompt_violations,
    sampling_params,
    text_size_violations,
)
from headrace.gateway_api.v1 import generation_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a call came, and how long its client will wait."""

    at: float  # time.monotonic()
    timeout_s: float | None  # None: for ever

    @classmethod
    def now(cls, timeout_s: float | None) -> "Arrival":
        """This moment."""
        return cls(time.monotonic(), timeout_s)

    def age_s(self) -> float:
        """Seconds since."""
        return time.monotonic() - self.at


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for a core, and what the output side needs to know of it."""

    request_id: str
    session_id: str
    model: ServedModel
    params: SamplingParams  # normalized
    engine_request: core_pb.EngineCoreRequest
    output_kind: pb.OutputKind.ValueType
    stream_interval: int
    return_prompt_token_ids: bool
    arrival: Arrival

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.engine_request.prompt_token_ids)

    @property
    def copies(self) -> int:
        """How many of the n outputs one completion of the core stands for: all of them where they cannot differ."""
        return self.params.n // len(self.engine_request.children)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as ids; `rendered` is the text of a chat, else empty."""

    token_ids: list[int]
    rendered: str


class InputProcessor:
    """One for each gateway process. `gateway_epoch` makes its internal ids unlike those of any other process."""

    def __init__(self, pool: Executor, gateway_epoch: str) -> None:
        self._pool = pool
        self._gateway_epoch = gateway_epoch
        self._counter = itertools.count()

    async def prepare(
        self, request: pb.GenerateRequest, request_id: str, model: ServedModel, arrival: Arrival
    ) -> PreparedRequest:
        """Checks and converts. Raises InvalidRequest with every broken rule, or Unimplemented."""
        params = sampling_params(request, model)
        violations = generate_violations(request, params, model)
        if not violations:
            refuse_unimplemented_generate(request)
        prompt = await self._tokenize(request.prompt, model, violations, params.truncate_prompt_tokens)
        if prompt is not None:
            field = f"prompt.{request.prompt.WhichOneof('form')}"
            violations += prompt_length_violations(field, len(prompt.token_ids), params, model)
        bad_words = await self._bad_words(params, model, violations)
        if params.structured_outputs is not None and not violations:
            await model.tools.structured_outputs(params.structured_outputs)
        if violations or prompt is None:
            raise InvalidRequest(violations)
        params = params.normalized()
        return PreparedRequest(
            request_id=request_id,
            session_id=request.session_id,
            model=model,
            params=params,
            engine_request=self._engine_request(
                request, request_id, params, prompt.token_ids, bad_words, model, arrival
            ),
            output_kind=request.output_kind or pb.OUTPUT_KIND_DELTA,
            stream_interval=request.stream_interval if request.HasField("stream_interval") else 1,
            return_prompt_token_ids=request.return_prompt_token_ids,
            arrival=arrival,
        )

    async def tokenize(self, request: pb.TokenizeRequest, model: ServedModel) -> TokenizedPrompt:
        """The ids of a text or chat. Raises InvalidRequest or Unimplemented."""
        violations = crowd_violations(request.prompt)
        if not violations:
            violations = unknown_fields(request) + prompt_violations(request.prompt, model, truncates=False)
        if not violations:
            refuse_unimplemented_prompt(request.prompt)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        prompt = await self._tokenize(request.prompt, model, violations, None, add_special_tokens=special)
        if violations or prompt is None:
            raise InvalidRequest(violations)
        return prompt

    async def detokenize(self, request: pb.DetokenizeRequest, model: ServedModel) -> str:
        """The text of ids. Raises InvalidRequest for ids outside the vocabulary."""
        if violations := unknown_fields(request):
            raise InvalidRequest(violations)
        ids = list(request.token_ids)
        return await self._in_pool(lambda: model.tokenizer.decode(ids, request.skip_special_tokens))

    async def _tokenize(
        self,
        prompt: pb.Prompt,
        model: ServedModel,
        violations: list[Violation],
        keep_last: int | None,
        *,
        add_special_tokens: bool = True,
    ) -> TokenizedPrompt | None:
        """None where the prompt itself is bad; why is then among the violations."""
        if any(violation.field.startswith("prompt") for violation in violations):
            return None
        form, rendered = prompt.WhichOneof("form"), ""
        if form == "token_ids":
            token_ids = list(prompt.token_ids.ids)
        elif form == "text":
            text = prompt.text
            token_ids = await self._in_pool(lambda: model.tokenizer.encode(text, add_special_tokens))
        else:
            try:
                rendered = await self._in_pool(lambda: render_chat(prompt.chat, model))
            except InvalidRequest as error:
                violations += error.violations
                return None
            if too_big := text_size_violations("prompt.chat", rendered, model, truncates=keep_last is not None):
                violations += too_big
                return None
            # The template writes the special tokens itself.
            token_ids = await self._in_pool(lambda: model.tokenizer.encode(rendered, add_special_tokens=False))
        return TokenizedPrompt(token_ids[-keep_last:] if keep_last else token_ids, rendered)

    async def _bad_words(self, params: SamplingParams, model: ServedModel, violations: list[Violation]) -> BadWords:
        """Token sequences of the bad words; none where something else is wrong with the request already."""
        if violations or not params.bad_words:
            return []
        sequences, found = await self._in_pool(lambda: bad_word_sequences(params.bad_words, model.tokenizer))
        violations += found
        return sequences

    def _engine_request(
        self,
        request: pb.GenerateRequest,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: list[int],
        bad_words: BadWords,
        model: ServedModel,
        arrival: Arrival,
    ) -> core_pb.EngineCoreRequest:
        seed = random.getrandbits(64) if params.seed is None else params.seed
        children = 1 if params.greedy else params.n  # the most likely tokens are the same for all
        age_s = arrival.age_s()
        result = core_pb.EngineCoreRequest(
            internal_id=f"{self._gateway_epoch}-{next(self._counter)}",
            external_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling_to_wire(_for_core(params, age_s)),
            children=[core_pb.Child(index=i, seed=(seed + i) % 2**64) for i in range(children)],
            bad_word_ids=[core_pb.TokenSequence(token_ids=ids) for ids in bad_words],
            eos_token_ids=model.eos_token_ids,
            priority=request.priority,
            age=duration(age_s),
            cache_salt=request.cache_salt,
        )
        if arrival.timeout_s is not None:
            result.timeout.CopyFrom(duration(max(arrival.timeout_s - age_s, 0.0)))
        return result

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def render_chat(chat: pb.Chat, model: ServedModel) -> str:
    """The text of a conversation, by the model's template. Raises InvalidRequest with what the template says."""
    if model.chat_template is None:
        raise InvalidRequest([Violation("prompt.chat", f"model {model.name} has no chat template")])
    return model.chat_template.render(
        messages=[_message(message) for message in chat.messages],
        tools=[json.loads(tool) for tool in chat.tools] or None,
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
        ),
        continue_final_message=chat.continue_final_message,
        variables=json.loads(chat.template_variables) if chat.template_variables else {},
    )


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": message.role,
        "content": message.content or "".join(part.text for part in message.parts),
    }
    if message.tool_calls:
        result["tool_calls"] = [json.loads(call) for call in message.tool_calls]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    return result


def _for_core(params: SamplingParams, age_s: float) -> SamplingParams:
    """With what is left of the time limit."""
    left = None if params.time_limit_s is None else max(params.time_limit_s - age_s, 1e-3)
    return replace(params, time_limit_s=left)
