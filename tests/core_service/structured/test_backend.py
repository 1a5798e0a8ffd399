"""Compiling happens elsewhere and once, faults are the request's own, and masks of many rows are each their own."""

import numpy as np
import pytest
from grammar_walks import EMPTY, FILES, VOCAB_SIZE, allowed, build_backend, start

from headrace.common.byte_tokenizer import EOS_ID
from headrace.common.errors import InvalidRequest
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_service.structured.backend import build_grammar_backend


def test_a_constraint_that_does_not_compile_fails_by_its_field_and_harms_no_other(backend):
    bad = backend.compile(StructuredOutputsParams(regex="(a"), (), (EOS_ID,))
    good = backend.compile(StructuredOutputsParams(regex="a"), (), (EOS_ID,))
    with pytest.raises(InvalidRequest, match=r"sampling\.structured_outputs\.regex: unclosed group"):
        bad.result(60)
    assert good.result(60).start(EMPTY).accept(ord("a"))


def test_a_grammar_that_overflows_the_compilers_stack_fails_alone(backend):
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'
    with pytest.raises(InvalidRequest, match="needed more stack"):
        backend.compile(StructuredOutputsParams(lark=chain), (), (EOS_ID,)).result(60)
    assert start(backend, StructuredOutputsParams(regex="a")).accept(ord("a"))


def test_rows_get_the_masks_of_their_own_grammars(backend):
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    grammars = [start(backend, StructuredOutputsParams(choice=(letter,))) for letter in letters]
    rows = np.arange(0, 2 * len(letters), 2, dtype=np.int32)
    masks = backend.begin_masks(rows, grammars)
    assert masks.rows is rows
    bits = np.unpackbits(masks.wait().view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[ord(letter)] for letter in letters]


def test_no_rows_are_no_masks(backend):
    assert backend.begin_masks(EMPTY, []).wait().shape == (0, VOCAB_SIZE // 32)


def test_a_grammar_that_runs_into_a_limit_allows_nothing_more(backend):
    grammar = start(backend, StructuredOutputsParams(regex="(a{1,1000}){1,1000}"), eos=())
    for taken in range(100_000):  # noqa: B007
        if not (ids := allowed(backend, grammar)):
            break
        assert grammar.accept(min(ids))
    assert taken > 10  # so nothing was wrong with it when it was compiled
    assert not grammar.accept(ord("a"))
    assert not grammar.exhausted


def test_equal_constraints_share_one_compiled_grammar():
    backend = build_backend()
    try:
        for _ in range(3):
            start(backend, StructuredOutputsParams(regex="a+"), eos=(EOS_ID,))
            start(backend, StructuredOutputsParams(regex="a+"), eos=())
        info = backend._matcher.cache_info()
        assert (info.misses, info.hits) == (1, 5)
    finally:
        backend.close()


def test_a_tokenizer_that_llguidance_does_not_know_is_refused_at_the_start():
    with pytest.raises(ValueError, match="tokenizer"):
        build_grammar_backend(TokenizerFiles({"tokenizer.json": b"{}"}), 300, (1,))


def test_a_vocabulary_without_end_tokens_ends_by_exhaustion():
    backend = build_grammar_backend(FILES, VOCAB_SIZE, ())
    try:
        grammar = start(backend, StructuredOutputsParams(regex="ab?"), eos=())
        assert grammar.accept(ord("a"))
        assert allowed(backend, grammar) == {ord("b")}
        assert grammar.accept(ord("b"))
        assert grammar.exhausted
    finally:
        backend.close()
