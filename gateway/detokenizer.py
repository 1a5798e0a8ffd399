"""Token ids to text, piece by piece, as a stream needs it.

Every token has exact bytes (`headrace.common.token_table`), so the text is an incremental UTF-8 decoding of them: what
is returned never ends inside a character, holds U+FFFD only where the whole decoding does, and adds up to it.
`tokenizers.DecodeStream` costs the same (0.5 us a token) but raises on some byte sequences, never gives out an
incomplete last character, and drops the space with which a SentencePiece completion starts.
"""

import codecs
from collections.abc import Sequence

from headrace.gateway.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one completion. Ids outside the vocabulary, which a padded model head can give, have no text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._decode = _Utf8Decoder("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add; an incomplete last character waits for the ids that follow."""
        return self.push_bytes(b"".join([self.bytes_of(i) for i in ids]))

    def push_bytes(self, data: bytes) -> str:
        """The same for the bytes of ids."""
        return self._decode.decode(data)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes at the end, 3 at most, that are the start of a character."""
        return len(self._decode.getstate()[0])

    def finish(self) -> str:
        """The rest: U+FFFD if the last character is incomplete, else nothing."""
        return self._decode.decode(b"", final=True)
