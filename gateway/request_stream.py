"""The output side of one Generate call: collects the news of its completions and makes messages of it.

The core's stream wakes the call's task, which takes all news at once. While the task waits for a slow client, news is
merged in the completions; what a client leaves unread is bounded in time (by the writer) and in size (here).
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator

from headrace.common.errors import Overloaded, RequestError
from headrace.common.params_wire import duration, seconds
from headrace.common.v1 import params_pb2
from headrace.gateway.completion import Completion, CompletionOptions
from headrace.gateway.core_client import Submission
from headrace.gateway.input_processor import PreparedRequest
from headrace.gateway.output_text import OutputText
from headrace.gateway.token_logprobs import PromptLogprobs
from headrace.gateway_api.v1 import generation_pb2 as pb

MAX_COPIES_BYTES = 1 << 20  # in one message, but for a final one
UNSENT_ENTRY_BYTES = 32  # a token, or one candidate of its log-probabilities


class RequestStream:
    """`completions` are the sinks to submit; then `attach` the submission, read `messages`, and `close` in any case."""

    def __init__(self, request: PreparedRequest, numerics_id: str, max_unsent_bytes: int) -> None:
        self._request = request
        self._numerics_id = numerics_id
        self._copies = request.copies
        self._max_unsent_bytes = max_unsent_bytes
        self._most_unread = max_unsent_bytes // UNSENT_ENTRY_BYTES  # entries
        self._submission: Submission | None = None
        self._error: RequestError | None = None
        self._wake = asyncio.Event()
        self._dirty: dict[int, Completion] = {}  # completions that may have something to send
        self._complete: set[int] = set()  # indices of completions with nothing more to come
        self._aborted: set[int] = set()  # indices of completions that the core was told to stop
        self._first_sent = False
        self._prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(request.num_prompt_tokens, request.params.first_prompt_logprob)
        options = completion_options(request)
        self.completions = [
            Completion(
                child.index,
                child.seed,
                options,
                self._prompt_logprobs if position == 0 else None,
                self._take_news,
                self._abort,
            )
            for position, child in enumerate(request.engine_request.children)
        ]
        self._positions = {completion.index: position for position, completion in enumerate(self.completions)}

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Over all outputs, sent or not."""
        return self._copies * sum(completion.num_output_tokens for completion in self.completions)

    @property
    def finish_reasons(self) -> list[str]:
        """Of each output, such as STOP; for the log."""
        return self._copies * [
            params_pb2.FinishReason.Name(completion.finish_reason).removeprefix("FINISH_REASON_")
            for completion in self.completions
        ]

    def attach(self, submission: Submission) -> None:
        """The submission that feeds the completions; no news can have come before."""
        self._submission = submission

    def fail(self, error: RequestError) -> None:
        """Ends the stream with this error, unless it has ended; what the completions have is sent before."""
        if self._error is None and len(self._complete) < len(self.completions):
            self._error = error
            self._abort_all()
            self._wake.set()

    def close(self) -> None:
        """The call is over, however it ended: nothing of it may go on in the core."""
        self._abort_all()

    async def messages(self) -> AsyncIterator[pb.GenerateResponse]:
        """All messages of the stream; then raises the error if it ended with one."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # As it is now: more may happen while a message is written, and it must be sent too before the end.
            error = self._error
            over = error is not None or len(self._complete) == len(self.completions)
            for message in self.take_messages(error, over=over):
                yield message
            if error is not None:
                raise error
            if over:
                return

    def _take_news(self, completion: Completion) -> None:
        self._dirty[completion.index] = completion
        self._wake.set()
        if completion.error is not None:
            self.fail(completion.error)
        elif completion.over and completion.complete:
            self._complete.add(completion.index)
        else:
            unread = self._copies * completion.unsent_entries
            if self._prompt_logprobs is not None:
                unread += self._prompt_logprobs.unsent_entries
            if unread > self._most_unread:
                self.fail(self._too_much_unread())

    def _too_much_unread(self) -> Overloaded:
        limit = self._max_unsent_bytes
        if self._request.output_kind == pb.OUTPUT_KIND_FINAL_ONLY:
            return Overloaded(f"the output kept for the final message passed {limit} bytes", reason="OUTPUT_TOO_LARGE")
        return Overloaded(f"the client left more than {limit} bytes of output unread", reason="SLOW_READER")

    def take_messages(self, error: RequestError | None = None, *, over: bool = False) -> Iterator[pb.GenerateResponse]:
        """What there is to send now; with totals if it is the last, which `error` may have caused."""
        if self._prompt_logprobs is not None:
            for slice_ in self._prompt_logprobs.take_slices(self._request.model.tokenizer):
                yield self._message(pb.GenerateResponse(prompt_logprobs=slice_))
            if not self._prompt_logprobs.complete and error is None:
                return
        if self._request.output_kind == pb.OUTPUT_KIND_FINAL_ONLY and not over:
            return
        message = pb.GenerateResponse()
        for completion in self._dirty.values():
            if completion.has_news():
                completion.take(message.outputs.add())
        self._dirty.clear()
        if message.outputs and self._copies > 1:
            # There is one completion, and it counts n times.
            whole = self._request.output_kind == pb.OUTPUT_KIND_FINAL_ONLY
            output = message.outputs[0]
            most = max(MAX_COPIES_BYTES // output.ByteSize(), 1)
            for index in range(1, self._copies):
                if len(message.outputs) == most and not whole:
                    yield self._message(message)
                    message = pb.GenerateResponse()
                _add_copy(message, output, index)
        if over:
            # A request that failed before its first token ends with the bare status, so that clients may retry it.
            if error is not None and not self._first_sent and not self.num_output_tokens:
                return
            self._add_totals(message)
        if over or message.outputs:
            yield self._message(message)

    def _message(self, message: pb.GenerateResponse) -> pb.GenerateResponse:
        message.exact = True
        if not self._first_sent:
            self._first_sent = True
            message.request_id = self._request.request_id
            message.numerics_id = self._numerics_id
            if self._request.return_prompt_token_ids:
                message.prompt_token_ids.extend(self._request.engine_request.prompt_token_ids)
        return message

    def _add_totals(self, message: pb.GenerateResponse) -> None:
        rows = [completion.terminal for completion in self.completions if completion.terminal is not None]
        message.usage.prompt_tokens = self._request.num_prompt_tokens
        message.usage.cached_tokens = max((row.cached_tokens for row in rows), default=0)
        message.usage.output_tokens = self.num_output_tokens
        for name in ("queue", "prefill", "decode"):
            longest = max((seconds(getattr(row.timing, name)) for row in rows), default=0.0)
            getattr(message.timing, name).CopyFrom(duration(longest))
        message.timing.preemptions = sum(row.timing.preemptions for row in rows)

    def _abort(self, completion: Completion) -> None:
        if self._submission is not None and not completion.over and completion.index not in self._aborted:
            self._aborted.add(completion.index)
            self._submission.abort(self._positions[completion.index])

    def _abort_all(self) -> None:
        for completion in self.completions:
            self._abort(completion)


def _add_copy(message: pb.GenerateResponse, output: pb.CompletionOutput, index: int) -> None:
    copy = message.outputs.add()
    copy.CopyFrom(output)
    copy.index = index
    if copy.HasField("seed"):
        copy.seed = (copy.seed + index) % 2**64


def completion_options(request: PreparedRequest) -> CompletionOptions:
    """How the completions of a request treat their output."""
    params, model = request.params, request.model
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(model.eos_token_ids)
    return CompletionOptions(
        text=functools.partial(
            OutputText,
            model.tokenizer,
            stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        if params.detokenize
        else None,
        tokenizer=model.tokenizer,
        stop_token_ids=stop_ids,
        logprobs=params.logprobs is not None or bool(params.logprob_token_ids),
        keep_all=request.output_kind == pb.OUTPUT_KIND_CUMULATIVE,
        min_new_tokens=request.stream_interval,
    )
