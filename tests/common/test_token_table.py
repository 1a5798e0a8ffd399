"""The bytes behind every id, against the library's own decoding."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import Decoder

from headrace.common.byte_tokenizer import byte_tokenizer_files
from headrace.common.errors import StartupError
from headrace.common.token_table import TokenTable, build_token_table, byte_alphabet

SENTENCEPIECE = ["<unk>", "<s>", *(f"<0x{byte:02x}>" for byte in range(256)), "▁", "▁a", "a▁b", "é", "<0xZZ>"]


def sentencepiece(*more_steps: Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(SENTENCEPIECE)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more_steps]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = byte_tokenizer_files(merges=[(b"\xf0", b"\x9f"), (b" ", b"a")]).build_tokenizer()
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("東京"), AddedToken("é")])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_LEVEL_TABLE = build_token_table(BYTE_LEVEL)


def text_of(table: TokenTable, ids: Sequence[int]) -> str:
    return b"".join(table.pieces[i] for i in ids).decode("utf-8", "replace")


@given(st.lists(st.integers(0, len(BYTE_LEVEL_TABLE.pieces) - 1), max_size=30))
def test_joined_bytes_decode_to_what_the_library_decodes(ids: Sequence[int]) -> None:
    assert text_of(BYTE_LEVEL_TABLE, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(st.lists(st.sampled_from(["▁a", "a▁b", "é", "<0xZZ>", "<s>", "▁"]), max_size=20))
def test_sentencepiece_pieces_decode_to_what_the_library_decodes(tokens: list[str]) -> None:
    tokenizer = sentencepiece()
    ids = [SENTENCEPIECE.index(token) for token in tokens]
    assert text_of(build_token_table(tokenizer), ids) == tokenizer.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=10))
def test_byte_tokens_decode_to_their_characters(text: str) -> None:
    tokenizer = sentencepiece()
    ids = [SENTENCEPIECE.index(f"<0x{byte:02x}>") for byte in text.encode()]
    assert text_of(build_token_table(tokenizer), ids) == text == tokenizer.decode(ids)


def test_a_broken_byte_spoils_no_character_beside_it() -> None:
    """The library gives U+FFFD for the whole run of bytes, so that a stream could show none of it before its end."""
    tokenizer = sentencepiece()
    ids = [SENTENCEPIECE.index(f"<0x{byte:02x}>") for byte in "é".encode() + b"\xff"]
    assert text_of(build_token_table(tokenizer), ids) == "é\ufffd"


def test_the_alphabet_has_a_printable_character_for_each_byte() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert all(character.isprintable() and not character.isspace() for character in alphabet.values())


def test_special_ids_are_those_flagged_special() -> None:
    assert BYTE_LEVEL_TABLE.special_ids == {256, 257}


@pytest.mark.parametrize(
    ("decoder", "drops"),
    [
        (decoders.ByteLevel(), False),
        (decoders.Sequence([decoders.ByteLevel()]), False),
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
    ],
)
def test_known_decoders_are_taken(decoder: Decoder, drops: bool) -> None:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoder
    assert build_token_table(tokenizer).drops_leading_space is drops


def test_a_strip_step_means_that_texts_start_with_a_space() -> None:
    assert build_token_table(sentencepiece(decoders.Strip(" ", 1, 0))).drops_leading_space


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_other_decoders_are_refused_by_name(decoder: Decoder) -> None:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoder
    with pytest.raises(StartupError, match="has the decoder"):
        build_token_table(tokenizer)


def test_a_tokenizer_without_decoder_is_refused() -> None:
    with pytest.raises(StartupError, match="no decoder"):
        build_token_table(Tokenizer(models.BPE({}, [])))
