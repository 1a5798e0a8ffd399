"""Chat messages to prompt text, by the model's own template.

Equal to what Hugging Face transformers renders, byte for byte. The template runs in a process of its own
(`headrace.gateway.template_worker`) under limits that hold whatever it does; a process that overran them is replaced.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.common.errors import InternalError, InvalidRequest, Overloaded, StartupError, Violation
from headrace.common.limited_worker import LimitedWorker, WorkerLimits, WorkerLost, WorkerOverrun
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.gateway import template_worker as worker
from headrace.gateway.continued_message import cut_at_tag, tag_final_message

FIELD = "prompt.chat"
VARIABLES_FIELD = "prompt.chat.template_variables"
# Given by the request's own fields.
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 10.0  # for a machine that gives the worker no processor time
    memory_bytes: int = 512 * 2**20  # beyond what the worker takes before it compiles
    max_chars: int = 4 * 2**20  # of the rendered prompt


class ChatTemplate:
    """A compiled chat template. `render` may be called from any thread; renderings run one after the other."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        """Starts the worker and compiles: about 0.1 s. StartupError names the line that does not compile.

        `special_tokens` are variables of every rendering (bos_token, eos_token, ...). `tool_source` is another template
        for requests with tools.
        """
        self._sources = {"default": source} | ({"tool_use": tool_source} if tool_source else {})
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker = self._start_worker()

    @classmethod
    def from_files(cls, files: TokenizerFiles, limits: TemplateLimits | None = None) -> "ChatTemplate | None":
        """The template that came with a tokenizer, or None if it has none."""
        if not files.chat_template:
            return None
        return cls(
            files.chat_template,
            special_tokens=files.special_tokens,
            tool_source=files.chat_templates.get("tool_use"),
            limits=limits,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. It holds its special tokens already: encode it with `add_special_tokens=False`.

        Messages, tools and variables must be JSON values. `variables` go to the template as they are and may replace
        special tokens. InvalidRequest (field `prompt.chat`) if the template refuses the messages, fails, or needs more
        than the limits allow; Overloaded if the worker got no processor time or was ended by somebody.
        """
        self._check(messages, add_generation_prompt, continue_final_message, variables)
        chat = [_as_template_sees(message) for message in messages]
        final_text = ""
        template = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if continue_final_message:
            final_text = tag_final_message(chat, self._sources[template])
        request = {
            "template": template,
            "variables": {
                **self._special_tokens,
                "documents": None,
                **(variables or {}),
                "messages": chat,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
        }
        text = self._exchange(json.dumps(request).encode())
        return cut_at_tag(text, final_text) if continue_final_message else text

    def close(self) -> None:
        """Ends the worker process."""
        with self._lock:
            self._worker.close()

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
    ) -> None:
        violations = []
        if not messages:
            violations.append(Violation(f"{FIELD}.messages", "must hold at least one message"))
        if continue_final_message and add_generation_prompt:
            violations.append(
                Violation(f"{FIELD}.continue_final_message", "cannot be true with add_generation_prompt = true")
            )
        if reserved := sorted(RESERVED_VARIABLES & set(variables or {})):
            violations.append(Violation(VARIABLES_FIELD, f"must not name {', '.join(reserved)}"))
        if violations:
            raise InvalidRequest(violations)

    def _start_worker(self) -> LimitedWorker:
        """A worker that has compiled the templates. Raises StartupError or OSError."""
        limits = self._limits
        started = LimitedWorker(
            worker.__name__,
            json.dumps({"templates": self._sources, "max_chars": limits.max_chars}).encode(),
            WorkerLimits(limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes),
        )
        try:
            answer = started.exchange(worker.COMPILE)
        except (WorkerOverrun, WorkerLost) as gone:
            raise StartupError(f"the chat template cannot be compiled: it {gone}") from gone
        if answer[0] != worker.OK:
            started.close()
            raise StartupError(f"the chat template does not compile: {answer[1:].decode()}")
        return started

    def _exchange(self, request: bytes) -> str:
        with self._lock:
            if self._worker.dead:
                try:
                    self._worker = self._start_worker()
                except (OSError, StartupError) as error:  # it compiled before, so the machine is short of something
                    raise InternalError(f"cannot start a process for the chat template: {error}") from error
            try:
                answer = self._worker.exchange(request)
            except WorkerOverrun as overrun:
                raise InvalidRequest([Violation(FIELD, f"the chat template {overrun}")]) from overrun
            except WorkerLost as lost:
                raise Overloaded(f"{FIELD} could not be rendered: that {lost}", reason="TOO_BUSY_TO_RENDER") from lost
        kind, text = answer[0], answer[1:].decode()
        if kind == worker.OK:
            return text
        message = {
            worker.REFUSED: f"the chat template refused the messages: {text}",
            worker.TOO_LONG: f"the rendered prompt is longer than {self._limits.max_chars} characters",
        }.get(kind, f"the chat template failed: {text}")
        raise InvalidRequest([Violation(FIELD, message)])


def _as_template_sees(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as transformers hands it over: no null fields, reasoning under the names that templates use."""
    seen = {key: value for key, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING_NAMES if name in seen), None)
    if reasoning is None:
        return seen
    return {"thinking": reasoning, **seen, "reasoning_content": reasoning}
