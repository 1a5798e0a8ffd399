"""Words that must not appear in an output, as token ids.

A word stands for two token sequences, with and without a space before it, since most tokenizers have tokens of their
own for words inside a text. Only these sequences are kept out: the same letters in other tokens can still appear.
"""

from collections.abc import Sequence
from typing import TypeAlias

from headrace.common.errors import Violation
from headrace.common.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_NAMED
from headrace.gateway.tokenizer import Tokenizer

BadWords: TypeAlias = list[tuple[int, ...]]


def bad_word_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[BadWords, list[Violation]]:
    """The distinct token sequences of `words` (none empty), in order, and the rules that they break."""
    field = "text_options.bad_words"
    sequences: dict[tuple[int, ...], None] = {}
    found: list[Violation] = []
    for place, word in enumerate(words):
        own = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in _spellings(word)]
        if not all(own):
            found.append(Violation(f"{field}[{place}]", "has no tokens"))
        if (longest := max(map(len, own))) > MAX_BAD_WORD_TOKENS:
            found.append(Violation(f"{field}[{place}]", f"at most {MAX_BAD_WORD_TOKENS} tokens; got {longest}"))
        sequences |= dict.fromkeys(own)
    if len(sequences) > MAX_BAD_WORDS:
        found.append(
            Violation(
                field,
                f"at most {MAX_BAD_WORDS} token sequences, and a word has one with and one without a space before it; "
                f"got {len(sequences)}",
            )
        )
    return list(sequences), found[:MAX_NAMED]


def _spellings(word: str) -> tuple[str, ...]:
    """With and without a space before it; white space alone is only itself."""
    bare = word.lstrip(" ")
    return (bare, f" {bare}") if bare else (word,)
