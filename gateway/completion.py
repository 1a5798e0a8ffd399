"""One completion of a request: takes ids as the core makes them, gives text as the client may see it.

Between the two lies `OutputText`, which holds back half characters and what may become a stop string. Token ids and
their log-probabilities are held back with their text. News is merged in place until the call's task takes it, so a slow
reader costs one record, not a queue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.common.errors import InternalError, RequestError
from headrace.common.params_wire import seconds
from headrace.common.rpc_status import from_code
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.core_client import LogprobRow
from headrace.gateway.output_text import OutputText
from headrace.gateway.token_logprobs import PromptLogprobs, token_logprobs
from headrace.gateway.tokenizer import Tokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

# Where the core gave no code of its own.
_CODE_OF_REASON = {
    params_pb2.FINISH_REASON_ABORT: 1,  # CANCELLED
    params_pb2.FINISH_REASON_DEADLINE: 4,  # DEADLINE_EXCEEDED
    params_pb2.FINISH_REASON_ERROR: 13,  # INTERNAL
}

_KNOWN_REASONS = frozenset(params_pb2.FinishReason.values()) - {params_pb2.FINISH_REASON_UNSPECIFIED}

# CUMULATIVE output with log-probabilities is sent when it has grown by this part of its length, or repeating them would
# cost the square of it and hold up the streams of others.
REPEAT_SHARE = 32


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """How a completion's output is treated; the same for all completions of a request."""

    text: Callable[[], OutputText] | None  # None: ids only
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]  # end-of-sequence ids too, unless they are ignored
    logprobs: bool
    keep_all: bool  # CUMULATIVE: what was sent is sent again
    min_new_tokens: int  # per message, but for the first and the last


class Completion:
    """`CompletionSink` of one child.

    `on_news` is called whenever there may be something to send, `on_stop` when a stop string ended the output before
    the core did, so that the core is told.
    """

    def __init__(
        self,
        index: int,
        seed: int,
        options: CompletionOptions,
        prompt_logprobs: PromptLogprobs | None,
        on_news: Callable[["Completion"], None],
        on_stop: Callable[["Completion"], None],
    ) -> None:
        self.index = index
        self.seed = seed
        self.finish_reason: params_pb2.FinishReason.ValueType = params_pb2.FINISH_REASON_UNSPECIFIED
        self.terminal: core_pb.Finished | None = None
        self.over = False  # the core will say no more
        self.error: RequestError | None = None
        self.unsent_entries = 0  # tokens and log-probabilities that the client has not taken
        self._options = options
        self._prompt_logprobs = prompt_logprobs
        self._on_news = on_news
        self._on_stop = on_stop
        self._stop_token_ids = options.stop_token_ids
        self._text = options.text() if options.text else None
        self._parts: list[str] = []
        self._ids: list[int] = []  # from position _offset on
        self._rows: dict[int, LogprobRow] = {}  # from position _offset on
        self._built: dict[int, pb.TokenLogprobs] = {}  # of those, the ones that were sent and may be sent again
        self._offset = 0
        self._released = 0  # positions below may be sent
        self._sent = 0  # positions below were sent
        self._rows_end = 0  # positions below have their row
        self._logprob_sum, self._summed = 0.0, 0
        self._stop_token_id: int | None = None
        self._stop_text: str | None = None
        self._first_sent = self._last_sent = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the client gets, sent or not."""
        return self._released

    @property
    def finished(self) -> bool:
        """True once the output is whole, though the core may still owe its terminal row."""
        return self.finish_reason != params_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def complete(self) -> bool:
        """True once nothing more will come for the client."""
        if self.error is not None:
            return self.over
        prompt_here = self._prompt_logprobs is None or self._prompt_logprobs.complete
        return self.over and prompt_here and self._logprobs_here()

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """Turns ids into text; notices stop strings."""
        if self.finish_reason:
            return  # made before the core heard of the stop string
        self._ids += token_ids
        self.unsent_entries += len(token_ids)
        if self._text is None:
            self._released = self._offset + len(self._ids)
        elif token_ids:
            text, num_released, stop_text = self._text.push(
                token_ids, ends_with_stop_token=token_ids[-1] in self._stop_token_ids
            )
            if text:
                self._parts.append(text)
            self._released += num_released
            if stop_text is not None:
                self._stop_at(stop_text)
        self._on_news(self)

    def on_logprobs(self, position: int, row: LogprobRow) -> None:
        """Keeps the row for its token."""
        if position < self._offset:
            return
        self._rows[position] = row
        self.unsent_entries += len(row.token_ids)
        while self._rows_end in self._rows:
            self._rows_end += 1
        self._on_news(self)

    def on_prompt_logprobs(self, position: int, row: LogprobRow) -> None:
        """Keeps the row for the messages before the first output."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.add(position, row)
            self._on_news(self)

    def on_finished(self, finished: core_pb.Finished) -> None:
        """The core's last word; a stop string that came first stands."""
        self.terminal, self.over = finished, True
        if not self.finished:
            known = finished.reason in _KNOWN_REASONS
            self._finish(finished.reason if known else params_pb2.FINISH_REASON_ERROR)
            if not known:  # nobody may take it for success
                self.error = InternalError(f"the core ended the output for a reason unknown here: {finished.reason}")
            if finished.HasField("stop_token_id"):
                self._stop_token_id = finished.stop_token_id
            if finished.reason in _CODE_OF_REASON:
                self.error = from_code(
                    finished.code or _CODE_OF_REASON[finished.reason],
                    finished.message or params_pb2.FinishReason.Name(finished.reason),
                    seconds(finished.retry_delay) if finished.HasField("retry_delay") else 1.0,
                )
        self._on_news(self)

    def on_failed(self, error: RequestError) -> None:
        """The core is lost; an output that was whole already stays good."""
        self.over = True
        if not self.finished:
            self._finish(params_pb2.FINISH_REASON_ERROR)
            self.error = error
        self._on_news(self)

    def on_logprobs_lost(self, error: RequestError) -> None:
        """Fails the completion if it waits for rows."""
        waits = self._prompt_logprobs is not None and not self._prompt_logprobs.complete
        if (waits or not self._logprobs_here()) and self.error is None:
            self.finish_reason = params_pb2.FINISH_REASON_ERROR
            self.error = error
            self._on_stop(self)
            self._on_news(self)

    def has_news(self) -> bool:
        """True if there is something to send now."""
        options = self._options
        if self._last_sent or (options.logprobs and not self._logprobs_here()):
            return False
        if self.finish_reason:
            return True
        fresh = self._released - self._sent
        if not self._first_sent:
            return fresh >= 1
        if options.keep_all and options.logprobs and fresh < self._sent // REPEAT_SHARE:
            return False
        return fresh >= options.min_new_tokens

    def take(self, output: pb.CompletionOutput) -> None:
        """Puts what is new (or, where all is kept, everything so far) into an empty output; it counts as sent."""
        count = self._released - self._offset
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        output.index = self.index
        if self._parts:
            output.text = self._parts[0]
        output.token_ids.extend(self._ids[:count])
        output.token_offset = self._offset
        if self._options.logprobs:
            self._add_logprobs(output)
        if not self._first_sent:
            output.seed = self.seed
        if self.finished:
            output.finish_reason = self.finish_reason
            if self._stop_text is not None:
                output.stop_text = self._stop_text
            elif self._stop_token_id is not None:
                output.stop_token_id = self._stop_token_id
            self._last_sent = True
        self._first_sent = True
        self._sent = self._released
        self.unsent_entries = len(self._ids) - count
        if not self._options.keep_all:
            self._forget(count)

    def _stop_at(self, stop_text: str) -> None:
        self._stop_text = stop_text
        self.finish_reason = params_pb2.FINISH_REASON_STOP
        del self._ids[self._released - self._offset :]
        self._on_stop(self)

    def _finish(self, reason: params_pb2.FinishReason.ValueType) -> None:
        self.finish_reason = reason
        if self._text is not None:
            text, num_released, _ = self._text.finish()
            self._parts.append(text)
            self._released += num_released

    def _logprobs_here(self) -> bool:
        return not self._options.logprobs or self.error is not None or self._rows_end >= self._released

    def _add_logprobs(self, output: pb.CompletionOutput) -> None:
        tokenizer = self._options.tokenizer
        end = min(self._released, self._rows_end)
        for position in range(self._offset, end):
            message = self._built.get(position)
            if message is None:
                message = token_logprobs(self._rows[position], tokenizer)
                if self._options.keep_all:
                    self._built[position] = message
            output.logprobs.append(message)
        for position in range(self._summed, end):
            self._logprob_sum += self._rows[position].values[0]
        self._summed = max(end, self._summed)
        output.cumulative_logprob = self._logprob_sum

    def _forget(self, count: int) -> None:
        if self._rows:
            for position in range(self._offset, self._offset + count):
                self._rows.pop(position, None)
        del self._ids[:count]
        self._parts.clear()
        self._offset += count
