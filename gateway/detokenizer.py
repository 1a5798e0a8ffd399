"""Token ids to text, piece by piece, as a stream needs it.

Every token has exact bytes (`headrace.common.token_table`), so the text is an incremental UTF-8 decoding of them: what
is returned never ends inside a character, holds U+FFFD only where the whole decoding does, and adds up to it.
`tokenizers.DecodeStream` costs the same (0.5 us a token) but raises on some byte sequences, never gives out an
incomplete last character, and drops the space with which a SentencePiece completion starts.
"""

from codecs import utf_8_decode

from headrace.gateway.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes one completion. Ids outside the vocabulary, which a padded model head can give, have no text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._num_pieces = len(self._pieces)
        self.waiting = b""  # bytes at the end, 3 at most, that are the start of a character

    def push(self, token_id: int) -> str:
        """The text that this id adds; an incomplete last character waits for the ids that follow."""
        data = self._pieces[token_id] if 0 <= token_id < self._num_pieces else b""
        if self.waiting:
            data = self.waiting + data
        text, length = utf_8_decode(data, "replace")
        self.waiting = data[length:]
        return text

    def finish(self) -> str:
        """The rest: U+FFFD if the last character is incomplete, else nothing."""
        rest, self.waiting = self.waiting.decode("utf-8", "replace"), b""
        return rest
