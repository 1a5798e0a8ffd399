"""The exact bytes behind every token id.

Tokenizers print bytes as text in three ways, named by the decoder of tokenizer.json:

    ByteLevel            one printable character stands for each byte        "Ġhi"   GPT-2, Llama 3, Qwen
    Replace+ByteFallback "▁" stands for a space, "<0xE2>" for a single byte  "▁hi"   Llama 2, Mistral, Gemma
    Metaspace            "▁" stands for a space                              "▁hi"

With this table the text of any ids is the UTF-8 decoding of their joined bytes, so a stream of ids can be decoded piece
by piece with nothing but an incremental UTF-8 decoder.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from headrace.common.errors import StartupError

_SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What each id stands for; ids that the vocabulary lacks have no bytes."""

    pieces: tuple[bytes, ...]  # index is the token id
    special_ids: frozenset[int]
    drops_leading_space: bool  # a text's own encoding starts with a space that the text does not have


def build_token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of a tokenizer; StartupError names a decoder that is none of the three known ways."""
    decoder = _decoder_state(tokenizer)
    to_bytes = _byte_level_bytes
    drops_leading_space = False
    if _flattened(decoder, "decoders") != ["ByteLevel"]:
        to_bytes, drops_leading_space = _sentencepiece_bytes, _drops_leading_space(decoder)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = to_bytes(token)
    special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return TokenTable(tuple(pieces), frozenset(special_ids), drops_leading_space)


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_alphabet().items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # looks like a byte token but is text, such as <0xZZ>
    return token.replace(_SPACE_MARK, " ").encode()


def _decoder_state(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.decoder is None:
        raise StartupError("tokenizer.json has no decoder, so its ids cannot be turned into text")
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return state


def _flattened(state: dict[str, Any], key: str) -> list[str]:
    steps = state[key] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps]


def _drops_leading_space(decoder: dict[str, Any]) -> bool:
    """Checks that the decoder is a known SentencePiece form; True if it takes one space off the start."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["Metaspace"] if steps[0]["replacement"] == _SPACE_MARK:
            return bool(steps[0]["prepend_scheme"] != "never")
        case ["Replace", "ByteFallback", "Fuse"] if _replaces_space_mark(steps[0]):
            return False
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _replaces_space_mark(steps[0]):
            strip = steps[3]
            if (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0):
                return True
    raise StartupError(
        f"tokenizer.json has the decoder {json.dumps(decoder, ensure_ascii=False)[:300]}; "
        "supported are ByteLevel, Metaspace and Replace + ByteFallback + Fuse"
    )


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": _SPACE_MARK} and bool(step["content"] == " ")
