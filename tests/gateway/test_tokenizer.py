"""Text to ids and back."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.byte_tokenizer import BOS_ID, EOS_ID, byte_tokenizer_files
from headrace.common.errors import InvalidRequest
from headrace.gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_files(byte_tokenizer_files(merges=[(b"a", b"b"), (b"\xf0", b"\x9f")]))


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_token_bytes_join_to_the_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))).decode() == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
def test_decode_equals_the_library(ids: Sequence[int], skip_special_tokens: bool) -> None:
    library = byte_tokenizer_files(merges=[(b"a", b"b"), (b"\xf0", b"\x9f")]).build_tokenizer()
    assert TOKENIZER.decode(ids, skip_special_tokens) == library.decode(ids, skip_special_tokens=skip_special_tokens)


def test_special_tokens_are_left_out_on_demand() -> None:
    ids = [BOS_ID, 104, 105, EOS_ID]
    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<bos>hi<eos>"
    assert TOKENIZER.token_bytes(EOS_ID) == b"<eos>"


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, 2**31])
def test_ids_outside_the_vocabulary_are_refused_with_value_and_limit(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token_ids: ids must be between 0 and 259; got {bad}"):
        TOKENIZER.decode([1, bad])
    assert TOKENIZER.token_bytes(bad) == b""


def test_facts() -> None:
    assert TOKENIZER.vocab_size == 260
    assert TOKENIZER.special_ids == {BOS_ID, EOS_ID}
    assert (TOKENIZER.special_tokens["bos_token"], TOKENIZER.special_tokens["eos_token"]) == ("<bos>", "<eos>")


def test_many_threads_encode_alike() -> None:
    texts = [f"abab {n} 👍" * 50 for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == [TOKENIZER.encode(text) for text in texts]
