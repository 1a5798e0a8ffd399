"""Streams of ids to text: no half characters, nothing lost, nothing invented."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.byte_tokenizer import EOS_ID, byte_tokenizer_files
from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.gateway.detokenizer import IncrementalDetokenizer
from headrace.gateway.tokenizer import Tokenizer

# Tokens that end inside characters, as byte-level vocabularies have them.
MERGES = [(b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x91"), (b"a", b"\xe2"), (b"\x82", b"\xac"), (b"\x82\xac", b"\xc3")]
TOKENIZER = Tokenizer.from_files(byte_tokenizer_files(merges=MERGES))
DATA = Path(__file__).parents[1] / "data"
STRINGS = [json.loads(line)["text"] for line in (DATA / "strings.jsonl").read_text(encoding="utf-8").splitlines()]

token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1))
character_bytes = st.text(max_size=8).map(lambda text: list(text.encode()))


def deltas(tokenizer: Tokenizer, groups: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*("".join(map(detokenizer.push, group)) for group in groups), detokenizer.finish()]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[i] for i in ids]


def grouped(ids: Sequence[int], cuts: list[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(edges)]


def assert_laws(tokenizer: Tokenizer, ids: Sequence[int], parts: list[str], skip_special_tokens: bool = True) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens, continues_text=True)
    assert "".join(parts) == whole
    shown = ""
    for part in parts[:-1]:
        shown += part
        # A half character shown as U+FFFD would not be there in the whole.
        assert whole.startswith(shown)


@pytest.mark.parametrize("text", STRINGS)
def test_joined_deltas_equal_full_decode_one_token_at_a_time(text: str) -> None:
    ids = TOKENIZER.encode(text)
    parts = deltas(TOKENIZER, one_by_one(ids))
    assert_laws(TOKENIZER, ids, parts)
    assert "".join(parts) == text


@given(token_ids, st.lists(st.integers(0, 100)))
def test_joined_deltas_equal_full_decode_for_random_tokens_in_random_groups(
    ids: Sequence[int], cuts: list[int]
) -> None:
    assert_laws(TOKENIZER, ids, deltas(TOKENIZER, one_by_one(ids)))
    assert_laws(TOKENIZER, ids, deltas(TOKENIZER, grouped(ids, cuts)))


@given(st.lists(st.one_of(character_bytes, st.lists(st.integers(0x80, 0xFF), max_size=4))))
def test_joined_deltas_equal_full_decode_for_random_bytes(runs: list[list[int]]) -> None:
    ids = [byte for run in runs for byte in run]
    assert_laws(TOKENIZER, ids, deltas(TOKENIZER, one_by_one(ids)))


@given(st.text())
def test_valid_text_is_streamed_without_replacement_characters(text: str) -> None:
    parts = deltas(TOKENIZER, one_by_one(TOKENIZER.encode(text)))
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def test_an_incomplete_character_waits_and_ends_as_one_replacement_character() -> None:
    assert deltas(TOKENIZER, [[0x61, 0xE2], [0x82]]) == ["a", "", "\ufffd"]
    assert deltas(TOKENIZER, [[0x61, 0xE2], [0x82], [0xAC]]) == ["a", "", "€", ""]


def test_special_tokens_appear_only_on_demand() -> None:
    assert "".join(deltas(TOKENIZER, [[0x61], [EOS_ID], [0x62]])) == "ab"
    assert "".join(deltas(TOKENIZER, [[0x61], [EOS_ID], [0x62]], skip_special_tokens=False)) == "a<eos>b"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert "".join(deltas(TOKENIZER, [[0x61], [TOKENIZER.vocab_size], [-1], [0x62]])) == "ab"


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_files(load_tokenizer_files(resolve_model("demo").path))


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "ids_field", "text_field", "skip_special_tokens"),
    [("strings", "token_ids", "decoded", False), ("greedy", "output_token_ids", "output_text", True)],
)
def test_demo_streams_equal_the_reference_texts(
    demo_tokenizer: Tokenizer, name: str, ids_field: str, text_field: str, skip_special_tokens: bool
) -> None:
    for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        ids = case[ids_field]
        parts = deltas(demo_tokenizer, one_by_one(ids), skip_special_tokens)
        assert_laws(demo_tokenizer, ids, parts, skip_special_tokens)
        assert "".join(parts) == case[text_field] == demo_tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.model
@given(data=st.data())
def test_demo_streams_of_random_tokens_equal_the_librarys_decode(
    demo_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, demo_tokenizer.vocab_size - 1), max_size=40))
    assert_laws(demo_tokenizer, ids, deltas(demo_tokenizer, one_by_one(ids)))
