"""Puts the messages of a generation together, whatever their output kind, and writes them as JSON."""

import json
from dataclasses import dataclass, field
from typing import Any

from headrace.common import rpc_status
from headrace.common.errors import RequestError
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

Candidates = list[dict[str, Any]]


@dataclass(slots=True)
class Completion:
    """One output as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Candidates] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def as_json(self) -> dict[str, Any]:
        """The form that scripts read."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "logprobs": self.logprobs,
        }


class Completions:
    """All outputs of one request."""

    def __init__(self, output_kind: "pb.OutputKind.ValueType") -> None:
        self._deltas = output_kind in (pb.OUTPUT_KIND_UNSPECIFIED, pb.OUTPUT_KIND_DELTA)
        self._outputs: dict[int, Completion] = {}
        self._prompt_logprobs: list[Candidates | None] | None = None
        self._usage = pb.Usage()

    @property
    def outputs(self) -> list[Completion]:
        """Outputs by index."""
        return [self._outputs[index] for index in sorted(self._outputs)]

    def add(self, message: pb.GenerateResponse) -> dict[int, str]:
        """Takes a message of the stream; returns the new text of each output that has some."""
        new_text = {}
        for news in message.outputs:
            output = self._outputs.setdefault(news.index, Completion(news.index))
            text = output.text + news.text if self._deltas else news.text
            if len(text) > len(output.text):
                new_text[news.index] = text[len(output.text) :]
            output.text = text
            output.token_ids[news.token_offset :] = news.token_ids
            if news.logprobs:
                output.logprobs = output.logprobs or []
                output.logprobs[news.token_offset :] = [_candidates(position) for position in news.logprobs]
            if news.finish_reason:
                output.finish_reason = finish_reason_name(news.finish_reason)
                output.stop_reason = _stop_reason(news)
        if message.prompt_logprobs:
            self._prompt_logprobs = self._prompt_logprobs or []
            self._prompt_logprobs.extend(_candidates(position) or None for position in message.prompt_logprobs)
        if message.HasField("usage"):
            self._usage = message.usage
        return new_text

    def as_json(self) -> dict[str, Any]:
        """The form that scripts read."""
        return {
            "outputs": [output.as_json() for output in self.outputs],
            "prompt_logprobs": self._prompt_logprobs,
            "usage": {
                "prompt_tokens": self._usage.prompt_tokens,
                "cached_tokens": self._usage.cached_tokens,
                "output_tokens": self._usage.output_tokens,
            },
        }


def error_json(error: RequestError) -> str:
    """The line that scripts read from standard error."""
    content = {
        "code": rpc_status.code_name(error),
        "message": error.message,
        "violations": [{"field": v.field, "description": v.description} for v in error.violations],
    }
    return json.dumps({"error": content}, ensure_ascii=False)


def finish_reason_name(reason: "params_pb2.FinishReason.ValueType") -> str:
    """A word such as stop or time_limit."""
    known = reason in params_pb2.FinishReason.values()
    return params_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if known else "error"


def _stop_reason(output: pb.CompletionOutput) -> int | str | None:
    kind = output.WhichOneof("stop_reason")
    if kind == "stop_token_id":
        return output.stop_token_id
    return output.stop_text if kind == "stop_text" else None


def _candidates(position: pb.TokenLogprobs) -> Candidates:
    return [
        {
            "token_id": candidate.token_id,
            "token": candidate.token_bytes.decode("utf-8", "replace"),
            "logprob": candidate.logprob,
            "rank": candidate.rank,
        }
        for candidate in position.candidates
    ]
