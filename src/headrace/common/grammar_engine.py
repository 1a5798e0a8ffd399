"""What headrace uses of llguidance: a tokenizer, a matcher within limits, and its complaints in one line.

Checks and serving go through the same two functions, so what passed a check compiles in the core.
llguidance keeps the interpreter's lock free while it compiles and fills masks.
"""

import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

# With these the worst grammars that were tried take 30 ms for a mask, and 15 ms to accept a token. Ordinary schemas
# need a hundredth; one with 1,000 optional properties needs 4,000 items.
STEP_LEXER_FUEL = 50_000
STEP_MAX_ITEMS = 6_000
# Of 0.5 to 2 kB each, for as long as a grammar is cached.
MAX_LEXER_STATES = 20_000
MAX_REASON = 300

_LIMITS = LLParserLimits(
    step_lexer_fuel=STEP_LEXER_FUEL,
    step_max_items=STEP_MAX_ITEMS,
    max_items_in_row=STEP_MAX_ITEMS,
    max_lexer_states=MAX_LEXER_STATES,
    # Without it the first mask of a large one costs minutes, and no limit counts them.
    precompute_large_lexemes=True,
    verbose_errors=False,
)
_SOURCE_EXCERPT = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_INTERNAL_STATE = re.compile(r"\n<(state|grammar|non-verbose).*", re.DOTALL)
_PLACE_OF_REF = re.compile(r"\s+while processing json-schema:.*", re.DOTALL)
_REGEX_ECHO = re.compile(r".*\(in regex\): ", re.DOTALL)


def build_grammar_tokenizer(tokenizer_json: str, vocab_size: int | None, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The vocabulary as grammars see it: 0.15 s for 49,152 tokens.

    `vocab_size` is that of the model's head, None the tokenizer's own; ids that the tokenizer lacks are never allowed.
    Raises ValueError if llguidance does not know this kind of tokenizer.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start. Raises ValueError with llguidance's reason, in one line.

    The first mask is filled and a token tried: some grammars are too complex in a way that shows only then.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        mask = np.empty(mask_words(tokenizer.vocab_size), np.int32)
        fill_mask(matcher, mask)
        probe = matcher.deep_copy()
        probe.try_consume_tokens([_last_allowed(mask)])
        matcher = probe if probe.is_error() else matcher
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return matcher


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask."""
    return -(-vocab_size // 32)


def fill_mask(matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
    """Writes the allowed tokens into a contiguous mask [mask_words]; a matcher with an error allows only the end."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _last_allowed(mask: NDArray[np.int32]) -> int:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return len(bits) - 1 - int(bits[::-1].argmax())


def grammar_fault(grammar: str) -> str:
    """What is wrong with a grammar's text, whatever the vocabulary; empty if nothing is."""
    return one_line(LLMatcher.validate_grammar(grammar, limits=_LIMITS))


def lark_regex(pattern: str) -> str:
    r"""The pattern as it stands between the slashes of Lark. `\d` becomes `[0-9]`, as everybody means it."""
    return str(regex_to_lark(pattern, "d"))


def one_line(error: str) -> str:
    """llguidance's error without the excerpts and states that it appends, and without repeating the user's regex."""
    text = error
    for noise in (_INTERNAL_STATE, _SOURCE_EXCERPT, _PLACE_OF_REF):
        text = noise.sub("", text)
    text = _REGEX_ECHO.sub("", text)
    if text.startswith("regex parse error"):
        text = text.rpartition("error: ")[2]
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
