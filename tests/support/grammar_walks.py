"""Random outputs that a grammar allows, drawn from its own masks over a small vocabulary."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.common.byte_tokenizer import EOS_ID, byte_tokenizer_files
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.core_service.grammar import Grammar
from headrace.core_service.structured.backend import LlguidanceBackend, build_grammar_backend

MERGES = (
    (b"{", b'"'),
    (b'"', b":"),
    (b'"', b","),
    (b'"', b"}"),
    (b" ", b" "),
    (b"t", b"r"),
    (b"u", b"e"),
    (b"tr", b"ue"),
    (b"a", b"b"),
    (b"ab", b"c"),
    (b"1", b"0"),
    (b"10", b"0"),
    (b"]", b"}"),
    (b"y", b"e"),
    (b"ye", b"s"),
    (b"\xc3", b"\xa9"),
)
FILES = byte_tokenizer_files(merges=MERGES)
VOCAB_SIZE = 320  # a head larger than the tokenizer
PIECES = {i: bytes([i]) for i in range(256)} | {258 + n: left + right for n, (left, right) in enumerate(MERGES)}
EMPTY = np.empty(0, np.int32)


@dataclass
class Walk:
    """An output: its tokens without the end token, and how it ended."""

    tokens: list[int]
    ended: bool  # by an end-of-sequence token, or because nothing else may follow
    grammar: Grammar

    @property
    def data(self) -> bytes:
        return b"".join(PIECES[token] for token in self.tokens)

    @property
    def text(self) -> str:
        return self.data.decode()


def build_backend() -> LlguidanceBackend:
    return build_grammar_backend(FILES, VOCAB_SIZE, (EOS_ID,))


def start(
    backend: LlguidanceBackend,
    params: StructuredOutputsParams,
    *,
    after: tuple[int, ...] = (),
    eos: tuple[int, ...] = (EOS_ID,),
    output: tuple[int, ...] = (),
) -> Grammar:
    return backend.compile(params, after, eos).result(60).start(np.array(output, np.int32))


def allowed(backend: LlguidanceBackend, grammar: Grammar) -> set[int]:
    """Ids that the mask allows."""
    mask = backend.begin_masks(np.zeros(1, np.int32), [grammar]).wait()[0]
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(
    backend: LlguidanceBackend,
    grammar: Grammar,
    seed: int,
    *,
    eos: tuple[int, ...] = (EOS_ID,),
    most: int = 400,
    see: Callable[[list[int], set[int]], None] = lambda tokens, ids: None,
) -> Walk:
    """Draws tokens that the masks allow; `see` gets the tokens so far and the allowed ids before every draw."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most and not grammar.exhausted:
        ids = allowed(backend, grammar)
        see(tokens, ids)
        assert ids, f"nothing is allowed after {tokens}"
        token = rng.choice(sorted(ids))
        assert grammar.accept(token), f"{token} is allowed, and not accepted, after {tokens}"
        if token in eos:
            return Walk(tokens, True, grammar)
        tokens.append(token)
    return Walk(tokens, grammar.exhausted, grammar)
