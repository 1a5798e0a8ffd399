"""Which ids end an output, in the bits of a mask."""

import numpy as np

from headrace.common.grammar_engine import mask_words
from headrace.core_service.batch import Int32Array


class EndTokens:
    """llguidance allows the tokenizer's end tokens where a text may end; a request may have others, or none."""

    def __init__(self, vocab_size: int, tokenizer_ids: tuple[int, ...], request_ids: tuple[int, ...]) -> None:
        """`tokenizer_ids`, at least one, are those that llguidance takes as the end."""
        self.request_ids = request_ids
        bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
        bits[:vocab_size] = 1
        # The mask that allows every token of the vocabulary, [ceil(vocab_size / 32)].
        self.everything: Int32Array = np.packbits(bits, bitorder="little").view(np.int32)
        self._tokenizer_ids = tokenizer_ids
        self._same = set(tokenizer_ids) == set(request_ids)

    def apply(self, mask: Int32Array) -> None:
        """Hands llguidance's verdict on its own end tokens to those of the request, and to no others."""
        if self._same:
            return
        words = mask.view(np.uint32)
        first = self._tokenizer_ids[0]
        may_end = int(words[first // 32]) >> (first % 32) & 1
        for token in self._tokenizer_ids:
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        for token in self.request_ids:
            bit = 1 << token % 32
            words[token // 32] = (int(words[token // 32]) & ~bit) | (bit if may_end else 0)
