"""Words that must not appear, as token sequences."""

from typing import Any

import pytest
from gateway_harness import Client, model_files, text_request
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headrace.common.tokenizer_files import TokenizerFiles
from headrace.gateway.bad_words import bad_word_sequences
from headrace.gateway.fakes import FakeCore
from headrace.gateway.tokenizer import Tokenizer

BYTES = Tokenizer.from_files(model_files())


def spelled(*texts: str) -> list[tuple[int, ...]]:
    return [tuple(text.encode()) for text in texts]


def test_a_word_is_barred_with_and_without_a_space_before_it() -> None:
    assert bad_word_sequences(["cat"], BYTES) == (spelled("cat", " cat"), [])


def test_spaces_before_a_word_make_no_difference() -> None:
    assert bad_word_sequences(["  cat"], BYTES) == (spelled("cat", " cat"), [])


def test_a_sequence_stands_once() -> None:
    assert bad_word_sequences(["b", " b", "a", "b"], BYTES) == (spelled("b", " b", "a", " a"), [])


def test_white_space_alone_is_only_itself() -> None:
    assert bad_word_sequences(["  "], BYTES) == (spelled("  "), [])


def test_the_number_of_sequences_is_bounded_after_duplicates_are_gone() -> None:
    words = [chr(ord("!") + i) for i in range(64)]
    sequences, found = bad_word_sequences(words * 2, BYTES)
    assert len(sequences) == 128
    assert found == []
    _, (violation,) = bad_word_sequences([*words, "~"], BYTES)
    assert violation.field == "text_options.bad_words"
    assert "128" in violation.description
    assert "130" in violation.description


@pytest.fixture
def deaf() -> Tokenizer:
    """A tokenizer that makes nothing of the letter x."""
    tokenizer = FastTokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer.from_files(TokenizerFiles.from_files({"tokenizer.json": tokenizer.to_str().encode()}))


def test_a_word_without_tokens_is_named(deaf: Tokenizer) -> None:
    _, found = bad_word_sequences(["a", "xx"], deaf)
    assert [(v.field, v.description) for v in found] == [("text_options.bad_words[1]", "has no tokens")]


async def test_the_core_gets_the_sequences(client: Client, core: FakeCore) -> None:
    request: Any = text_request("abc", max_tokens=1)
    request.text_options.bad_words.extend(["no", "never"])
    assert (await client.generate(request)).error is None
    sent = [tuple(word.token_ids) for word in core.requests[0].bad_word_ids]
    assert sent == spelled("no", " no", "never", " never")
