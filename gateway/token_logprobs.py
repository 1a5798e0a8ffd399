"""Log-probabilities as the core sends them, turned into what the client reads, and those of the prompt."""

from collections.abc import Iterator

from headrace.gateway.core_client import LogprobRow
from headrace.gateway.tokenizer import Tokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

MAX_SLICE_BYTES = 1 << 20


def token_logprobs(row: LogprobRow, tokenizer: Tokenizer) -> pb.TokenLogprobs:
    """The message for one position, with the bytes of each candidate.

    The core names the drawn token first, and again where it is among the most likely ones; here each stands once.
    """
    rows = zip(row.token_ids, row.values, row.ranks, strict=True)
    distinct = {token_id: (value, rank) for token_id, value, rank in rows}
    return pb.TokenLogprobs(
        candidates=[
            pb.TokenLogprobs.Candidate(
                token_id=token_id, token_bytes=tokenizer.token_bytes(token_id), logprob=value, rank=rank
            )
            for token_id, (value, rank) in distinct.items()
        ]
    )


class PromptLogprobs:
    """Rows of prompt positions `start` (at least 1) to `num_tokens` - 1, in any order and perhaps more than once.

    They leave in order, as soon as there is no gap before them. Positions before have empty rows; nothing predicts
    position 0.
    """

    def __init__(self, num_tokens: int, start: int = 1) -> None:
        self.unsent_entries = 0  # candidates that were not taken yet
        self._num_tokens = num_tokens
        self._rows = dict.fromkeys(range(start), LogprobRow((), (), ()))
        self._next = 0  # positions below were taken
        self._end = start  # positions below have come

    @property
    def complete(self) -> bool:
        """True once every position has come."""
        return self._end == self._num_tokens

    def add(self, position: int, row: LogprobRow) -> None:
        """A row from the core; what was taken already is ignored."""
        if self._next <= position < self._num_tokens:
            if position not in self._rows:
                self.unsent_entries += len(row.token_ids)
            self._rows[position] = row
            while self._end in self._rows:
                self._end += 1

    def take_slices(self, tokenizer: Tokenizer, max_bytes: int = MAX_SLICE_BYTES) -> Iterator[list[pb.TokenLogprobs]]:
        """What is ready, in lists of at most `max_bytes` serialized (or of one position, if that alone is longer)."""
        slice_: list[pb.TokenLogprobs] = []
        size = 0
        while (row := self._rows.pop(self._next, None)) is not None:
            self._next += 1
            self.unsent_entries -= len(row.token_ids)
            message = token_logprobs(row, tokenizer)
            message_size = message.ByteSize() + 8
            if slice_ and size + message_size > max_bytes:
                yield slice_
                slice_, size = [], 0
            slice_.append(message)
            size += message_size
        if slice_:
            yield slice_
