"""What one engine step produced, before it is split by gateway: columns for tokens, lists for what is rare."""

from dataclasses import dataclass

import numpy as np
from google.rpc import code_pb2

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import Int32Array, LogprobRows, StepResult
from headrace.core_service.request import Sequence
from headrace.core_service.sequence_table import SequenceTable

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
        self.logprob_rows: Int32Array = _NO_INTS  # [num_tokens] row in `logprobs`, or -1
        self.logprobs: LogprobRows | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.finished: list[FinishedSequence] = []

    def set_tokens(self, table: SequenceTable, rows: Int32Array, result: StepResult) -> None:
        """The tokens drawn for `rows`, before they are appended; a negative one is a failed draw and is left out."""
        self.logprobs = result.logprobs
        logprob_rows = np.full(len(rows), -1, np.int32)
        if result.logprobs is not None:
            logprob_rows[result.logprobs.rows] = np.arange(len(result.logprobs.rows), dtype=np.int32)
        good = result.token_ids >= 0
        if not good.all():
            rows, logprob_rows = rows[good], logprob_rows[good]
        self.clients, self.slots = table.client[rows], table.slot[rows]
        self.token_ids = result.token_ids[good]
        self.positions = table.num_tokens[rows] - table.prompt_len[rows]
        self.logprob_rows = logprob_rows

    def finish(
        self,
        sequence: Sequence,
        reason: "FinishReason.ValueType",
        *,
        stop_token_id: int | None = None,
        code: int | None = None,
        message: str | None = None,
    ) -> None:
        """Adds a terminal record; code and message default to what the reason means."""
        self.finished.append(
            FinishedSequence(
                sequence,
                reason,
                stop_token_id,
                _CODE_OF_REASON.get(reason, code_pb2.OK) if code is None else code,
                _MESSAGE_OF_REASON.get(reason, "") if message is None else message,
            )
        )
