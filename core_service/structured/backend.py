"""Compiles grammars and fills masks with llguidance, all off the engine's thread."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import cast

from llguidance import LLMatcher, LLTokenizer

from headrace.common.grammar_checker import GrammarChecker
from headrace.common.grammar_engine import build_grammar_tokenizer, mask_words, new_matcher
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_service.batch import Int32Array
from headrace.core_service.grammar import CompiledGrammar, Grammar
from headrace.core_service.structured.end_tokens import EndTokens
from headrace.core_service.structured.masks import PendingMasks, begin_filling
from headrace.core_service.structured.output_grammar import CompiledOutputGrammar, OutputGrammar

COMPILE_THREADS = 2
MAX_MASK_THREADS = 4
CACHED_GRAMMARS = 16  # of a few MB, or as much as the checker allows


def build_grammar_backend(
    tokenizer: TokenizerFiles, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> "LlguidanceBackend":
    """The backend for a model whose head has `vocab_size` ids: 0.15 s for 49,152 tokens.

    Raises ValueError if llguidance does not know this kind of tokenizer.
    """
    tokenizer_json = tokenizer.files["tokenizer.json"]
    vocabulary = build_grammar_tokenizer(tokenizer_json.decode(), vocab_size, eos_token_ids)
    return LlguidanceBackend(vocabulary, GrammarChecker(tokenizer_json, vocab_size, eos_token_ids))


class LlguidanceBackend:
    """A GrammarBackend. A constraint is compiled in the checker's process first, which may die of it, then here."""

    def __init__(self, vocabulary: LLTokenizer, checker: GrammarChecker) -> None:
        self._vocabulary = vocabulary
        self._checker = checker
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "grammar-compiler")
        self._mask_threads = max(1, min(MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._fillers = ThreadPoolExecutor(self._mask_threads, "grammar-masks")
        self._matcher = lru_cache(CACHED_GRAMMARS)(self._new_matcher)
        self._ends = lru_cache(CACHED_GRAMMARS)(self._new_ends)

    def compile(
        self, constraint: StructuredOutputsParams, after: tuple[int, ...], eos_token_ids: tuple[int, ...]
    ) -> "Future[CompiledGrammar]":
        """The grammar of a constraint, which takes hold once the ids `after` have appeared in the output (empty: at
        once). The future raises RequestError if it does not compile, or not within the limits of time and size."""
        return self._compilers.submit(
            lambda: CompiledOutputGrammar(self._matcher(constraint), after, self._ends(eos_token_ids))
        )

    def begin_masks(self, rows: Int32Array, grammars: Sequence[Grammar]) -> PendingMasks:
        """Starts filling the masks of positions `rows` in the samples, one for each grammar; returns at once. The
        grammars must not change until the masks have been waited for."""
        words = mask_words(self._vocabulary.vocab_size)
        return begin_filling(self._fillers, rows, cast(Sequence[OutputGrammar], grammars), words, self._mask_threads)

    def close(self) -> None:
        """Ends the checker's process and the threads, without waiting for work under way."""
        self._checker.close()
        for pool in (self._compilers, self._fillers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _new_matcher(self, constraint: StructuredOutputsParams) -> LLMatcher:
        return new_matcher(self._vocabulary, self._checker.check(constraint).get())

    def _new_ends(self, eos_token_ids: tuple[int, ...]) -> EndTokens:
        return EndTokens(self._vocabulary.vocab_size, tuple(self._vocabulary.eos_tokens), eos_token_ids)
