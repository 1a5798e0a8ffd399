"""What one engine step produced, before it is split by gateway: columns for tokens, lists for what is rare."""

from dataclasses import dataclass

import numpy as np
from google.rpc import code_pb2
from numpy.typing import NDArray

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import Int32Array, LogprobRows, StepResult
from headrace.core_service.draw_facts import DrawFacts
from headrace.core_service.request import Sequence

_CODE_OF_REASON = {
    FinishReason.FINISH_REASON_ABORT: code_pb2.CANCELLED,
    FinishReason.FINISH_REASON_DEADLINE: code_pb2.DEADLINE_EXCEEDED,
    FinishReason.FINISH_REASON_ERROR: code_pb2.INTERNAL,
}
_MESSAGE_OF_REASON = {
    FinishReason.FINISH_REASON_ABORT: "the request was aborted",
    FinishReason.FINISH_REASON_DEADLINE: "the request's deadline passed",
}


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The one terminal record of a sequence."""

    sequence: Sequence
    reason: "FinishReason.ValueType"
    stop_token_id: int | None = None
    code: int = code_pb2.OK
    message: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt positions `first_position`, `first_position` + 1, …"""

    sequence: Sequence
    first_position: int
    rows: LogprobRows


_NO_INTS = np.empty(0, np.int32)


class EngineOutputs:
    """Filled by the scheduler during one step. Tokens come before the terminal records of their sequences."""

    def __init__(self) -> None:
        self.clients: Int32Array = _NO_INTS  # [num_tokens] whose token it is
        self.slots: Int32Array = _NO_INTS  # [num_tokens]
        self.token_ids: Int32Array = _NO_INTS  # [num_tokens]
        self.positions: Int32Array = _NO_INTS  # [num_tokens] index of the token in its output
        self.logprob_rows: Int32Array = _NO_INTS  # [num_tokens] row in `logprobs`, or -1; not set without
        self.logprobs: LogprobRows | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.finished: list[FinishedSequence] = []

    def set_tokens(
        self, draws: DrawFacts, positions: Int32Array, result: StepResult, delivered: NDArray[np.bool_]
    ) -> None:
        """The tokens drawn at `positions` [num_samples] of their outputs; those outside the mask are left out."""
        which: NDArray[np.bool_] | slice = slice(None) if delivered.all() else delivered
        self.clients, self.slots, self.token_ids = draws.client[which], draws.slot[which], result.token_ids[which]
        self.positions = positions[which]
        self.logprobs = result.logprobs
        if result.logprobs is not None:
            logprob_rows = np.full(len(delivered), -1, np.int32)
            logprob_rows[result.logprobs.rows] = np.arange(len(result.logprobs.rows), dtype=np.int32)
            self.logprob_rows = logprob_rows[which]

    def finish(
        self,
        sequence: Sequence,
        reason: "FinishReason.ValueType",
        *,
        stop_token_id: int | None = None,
        code: int | None = None,
        message: str | None = None,
        retryable: bool = False,
    ) -> None:
        """Adds a terminal record; code and message default to what the reason means."""
        self.finished.append(
            FinishedSequence(
                sequence,
                reason,
                stop_token_id,
                _CODE_OF_REASON.get(reason, code_pb2.OK) if code is None else code,
                _MESSAGE_OF_REASON.get(reason, "") if message is None else message,
                retryable,
            )
        )
