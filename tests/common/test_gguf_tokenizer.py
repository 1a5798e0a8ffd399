"""Tokenizer files made from GGUF metadata."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.byte_tokenizer import BOS, EOS, byte_tokenizer_files
from headrace.common.errors import StartupError
from headrace.common.gguf_tokenizer import merges_from_scores, tokenizer_files_from_gguf
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.gateway.tokenizer import Tokenizer

MERGES = [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b" ", b"hell"), (b"1", b"2"), (b"\xe2", b"\x82"), (b"i", b"i")]


def byte_level_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """The metadata of a GGUF file with the vocabulary of `byte_tokenizer_files`."""
    model = json.loads(byte_tokenizer_files(merges=MERGES).files["tokenizer.json"])["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(3 if token in (BOS, EOS) else 1 for token in tokens),
        "tokenizer.ggml.merges": tuple(" ".join(merge) for merge in model["merges"]),
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        **more,
    }


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ello", "▁hello", "ll"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": (2, 3, 3) + (6,) * 256 + (1,) * len(pieces),
        "tokenizer.ggml.scores": tuple([0.0] * 259 + [-float(i) for i in range(len(pieces))]),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_files(TokenizerFiles.from_files(tokenizer_files_from_gguf(metadata)))


def words(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_a_gguf_file_and_its_tokenizer_json_have_one_digest() -> None:
    from_gguf = TokenizerFiles.from_files(tokenizer_files_from_gguf(byte_level_metadata()))
    assert from_gguf.digest == byte_tokenizer_files(merges=MERGES).digest


def test_padding_tokens_do_not_change_the_digest() -> None:
    plain = byte_level_metadata()
    padded = plain | {
        "tokenizer.ggml.tokens": (*plain["tokenizer.ggml.tokens"], "[PAD0]", "[PAD1]"),
        "tokenizer.ggml.token_type": (*plain["tokenizer.ggml.token_type"], 5, 5),
    }
    digests = {TokenizerFiles.from_files(tokenizer_files_from_gguf(m)).digest for m in (plain, padded)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a 12", [b"a", b" ", b"12"]),
        ("smollm", "a 12", [b"a", b" ", b"1", b"2"]),
        ("llama-bpe", "1212", [b"12", b"1", b"2"]),  # three digits at most in a word
        ("qwen2", "12", [b"1", b"2"]),
        ("gpt-2", " hell hell", [b" hell", b" hell"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_in_its_own_way(pre: str, text: str, expected: Any) -> None:
    assert words(make_tokenizer(byte_level_metadata(pre)), text) == expected


def test_qwen2_composes_characters_first() -> None:
    tokenizer = make_tokenizer(byte_level_metadata("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="pre-tokenizer is 'falcon'"):
        tokenizer_files_from_gguf(byte_level_metadata("falcon"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.model": "t5"}, "model is 't5'"),
        ({"tokenizer.ggml.tokens": ()}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": (1,)}, "token types"),
        ({"tokenizer.ggml.merges": None}, "without merges"),
        ({"tokenizer.ggml.merges": ("a b c",)}, "merge"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "asks to add the bos_token"),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        tokenizer_files_from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (byte_level_metadata("gpt-2"), [104]),
        (byte_level_metadata("llama-bpe"), [256, 104]),
        (byte_level_metadata("gpt-2", **{"tokenizer.ggml.add_bos_token": True}), [256, 104]),
        (byte_level_metadata("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}), [104]),
        (byte_level_metadata("gpt-2", **{"tokenizer.ggml.add_eos_token": True}), [104, 257]),
    ],
)
def test_special_tokens_are_added_as_the_file_says_or_the_family_does(metadata: dict[str, Any], expected: Any) -> None:
    tokenizer = make_tokenizer(metadata)
    assert tokenizer.encode("h") == expected
    assert tokenizer.encode("h", add_special_tokens=False) == [104]


def test_end_of_turn_ids_end_a_generation_too() -> None:
    ends = {"tokenizer.ggml.eot_token_id": 10, "tokenizer.ggml.eom_token_id": 257}
    metadata = byte_level_metadata() | ends
    assert TokenizerFiles.from_files(tokenizer_files_from_gguf(metadata)).eos_token_ids == (257, 10)


def test_the_chat_template_is_taken_over() -> None:
    files = TokenizerFiles.from_files(
        tokenizer_files_from_gguf(byte_level_metadata(**{"tokenizer.chat_template": "{{ é }}"}))
    )
    assert files.chat_template == "{{ é }}"


def test_sentencepiece_joins_the_best_scored_pieces_first() -> None:
    assert words(make_tokenizer(sentencepiece_metadata()), "hello") == [b" hello"]
    assert words(make_tokenizer(sentencepiece_metadata()), "hell") == [b" h", b"el", b"l"]


def test_sentencepiece_starts_with_bos_and_a_space() -> None:
    tokenizer = make_tokenizer(sentencepiece_metadata())
    ids = tokenizer.encode("hello")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, continues_text=True) == " hello"


def test_sentencepiece_without_space_prefix_adds_none() -> None:
    tokenizer = make_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert words(tokenizer, "h") == [b"h"]
    assert tokenizer.decode(tokenizer.encode(" h")) == " h"


def test_typing_a_byte_token_does_not_make_one() -> None:
    tokenizer = make_tokenizer(sentencepiece_metadata())
    assert tokenizer.decode(tokenizer.encode("<0x0A>")) == "<0x0A>"


@given(st.text().filter(lambda text: "▁" not in text))
def test_sentencepiece_text_survives_the_round_trip(text: str) -> None:
    tokenizer = make_tokenizer(sentencepiece_metadata())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_follow_the_scores_of_the_pieces_that_they_make() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    merges = merges_from_scores(vocab, (0, 0, 0, -5.0, -1.0, -3.0))
    assert merges == [("b", "c"), ("a", "bc"), ("ab", "c"), ("a", "b")]


def test_a_sentencepiece_vocabulary_needs_scores() -> None:
    with pytest.raises(StartupError, match="score"):
        tokenizer_files_from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.scores": None}))
