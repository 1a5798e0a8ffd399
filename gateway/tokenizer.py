"""Text to token ids and back, for one model."""

from collections.abc import Sequence

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.token_table import build_token_table
from headrace.common.tokenizer_files import TokenizerFiles


class Tokenizer:
    """Encodes and decodes; every method may be called from any thread.

    Text is the UTF-8 decoding of the ids' joined bytes, with U+FFFD for what is not UTF-8. Nothing is cleaned up and no
    spaces are put between special tokens, so the text of a whole is the text of its parts side by side.
    `spaces_between_special_tokens` therefore makes no difference, as with every tokenizer of the `tokenizers` library.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.build_tokenizer()
        self._table = build_token_table(self._tokenizer)
        self._pieces = self._table.pieces
        special = self._table.special_ids
        self._pieces_without_special = tuple(b"" if i in special else piece for i, piece in enumerate(self._pieces))
        self.special_tokens = files.special_tokens

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> "Tokenizer":
        """The tokenizer that the files define; StartupError if they do not define one that is supported."""
        return cls(files)

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one. A model's head may be larger: its further ids have no text."""
        return len(self._pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are markup, not text."""
        return self._table.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; rendered chat prompts hold their special tokens already, so pass False for them."""
        # The batch call lets go of the interpreter lock while it works, the single one does not: half a second for a
        # megabyte of text, in which no stream would move.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, continues_text: bool = False) -> str:
        """Text of token ids.

        `continues_text` says that the ids go on from others, as a completion does from its prompt: then the space with
        which a SentencePiece tokenizer marks the first word is kept. InvalidRequest (field `token_ids`) if an id is
        outside the vocabulary.
        """
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise InvalidRequest(
                [
                    Violation(
                        "token_ids",
                        f"ids must be between 0 and {self.vocab_size - 1}; got {', '.join(map(str, bad[:5]))}",
                    )
                ]
            )
        pieces = self.pieces(skip_special_tokens)
        text = b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
        return text[1:] if self._table.drops_leading_space and not continues_text and text[:1] == " " else text

    def pieces(self, skip_special_tokens: bool) -> tuple[bytes, ...]:
        """Bytes by token id; special tokens have none if they are skipped."""
        return self._pieces_without_special if skip_special_tokens else self._pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, also of a special one; none for an id outside the vocabulary.

        The joined bytes of a completion's ids decode to its text.
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""
