"""From the core's steps to a completion's text, ids and log-probabilities, against an oracle that sees all at once.

The oracle decodes everything at the end, then looks for the stop strings by trying every end and every stop in order.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from gateway_harness import model_files
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as LibraryTokenizer

from headrace.common.byte_tokenizer import EOS_ID, byte_tokenizer_files
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.completion import Completion, CompletionOptions
from headrace.gateway.output_text import OutputText
from headrace.gateway.slots import SlotTable
from headrace.gateway.step_demux import deliver_step
from headrace.gateway.tokenizer import Tokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

NO_TEXT = 10_000  # an id that only a padded head has
EMOJI = "🌶".encode()
ALPHABET = "abé€🌶\ufffd "


def byte_fallback_files() -> TokenizerFiles:
    """As SentencePiece vocabularies have it: words, and a token for each byte where there is no word."""
    vocab = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "a▁b", "é", "€a"]
    tokenizer = LibraryTokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "</s>"})}
    return TokenizerFiles.from_files({name: content.encode() for name, content in files.items()})


MERGES = [
    (b"a", b"b"),
    (EMOJI[:1], EMOJI[1:2]),
    (EMOJI[1:2], EMOJI[2:3]),
    (b"\xac", b"a"),
    (b"b", b"\xe2"),
    (b"a", b"\xc3"),
]
BYTE_LEVEL = Tokenizer.from_files(byte_tokenizer_files(merges=MERGES))
BYTE_FALLBACK = Tokenizer.from_files(byte_fallback_files())
# Ids that spell the alphabet whole, in parts and broken, and some without text.
BYTES = [*b"ab ", *"é€🌶".encode(), 0xFF]
IDS = {
    BYTE_LEVEL: [*BYTES, *range(258, BYTE_LEVEL.vocab_size), EOS_ID, NO_TEXT],
    BYTE_FALLBACK: [1, *(2 + byte for byte in BYTES), *range(258, BYTE_FALLBACK.vocab_size), NO_TEXT],
}
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@dataclass(frozen=True)
class Expected:
    text: str
    num_tokens: int
    stop: str | None


def complete_text(data: bytes) -> str:
    """The text of bytes that may go on: without the start of a character at its end."""
    for length in (1, 2, 3):
        tail, missing = data[-length:], range(1, 5 - length)
        if len(tail) == length and any(
            is_one_character(tail + bytes(more)) for n in missing for more in product((0x80, 0x90, 0xBF), repeat=n)
        ):
            return data[:-length].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def oracle(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], include_stop: bool, min_tokens: int
) -> Expected:
    pieces = [tokenizer.pieces(True)[i] if i < tokenizer.vocab_size else b"" for i in ids]
    whole = b"".join(pieces)
    text = complete_text(whole)
    shown = [len(complete_text(b"".join(pieces[:count]))) for count in range(len(ids) + 1)]
    for end, stop in product(range(1, len(text) + 1), stops):
        count = next(count for count, length in enumerate(shown) if length >= end)
        if count > min_tokens and text[:end].endswith(stop):
            return Expected(text[: end if include_stop else end - len(stop)], count, stop)
    return Expected(whole.decode("utf-8", "replace"), len(ids), None)


class Output:
    """One completion and what it was asked for."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], include_stop: bool, min_tokens: int) -> None:
        self.told_to_stop = 0
        options = CompletionOptions(
            text=functools.partial(
                OutputText, tokenizer, stops=stops, include_stop=include_stop, min_tokens=min_tokens
            ),
            tokenizer=tokenizer,
            stop_token_ids=frozenset(),
            logprobs=True,
            keep_all=False,
            min_new_tokens=1,
        )
        self.completion = Completion(0, 0, options, None, lambda _: None, self._stop)
        self.messages: list[pb.CompletionOutput] = []

    def read(self) -> None:
        if self.completion.has_news():
            self.messages.append(pb.CompletionOutput())
            self.completion.take(self.messages[-1])

    def _stop(self, _: Completion) -> None:
        self.told_to_stop += 1


@pytest.mark.parametrize("tokenizer", IDS, ids=["byte level", "byte fallback"])
@given(data=st.data(), stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 5))
def test_rows_of_any_number_of_tokens_give_the_text_ids_and_logprobs_of_the_oracle(
    tokenizer: Tokenizer, data: st.DataObject, stops: list[str], include: bool, min_tokens: int
) -> None:
    """Two completions share the steps; what lies behind a stop string is in no text, id or log-probability."""
    streams = [data.draw(st.lists(st.sampled_from(IDS[tokenizer]), max_size=16)) for _ in range(2)]
    outputs = [Output(tokenizer, stops, include, min_tokens) for _ in streams]
    table = SlotTable()
    table.allocate("id", [output.completion for output in outputs])
    positions = [0, 0]
    while any(position < len(ids) for position, ids in zip(positions, streams, strict=True)):
        step = core_pb.StepOutputs()
        for slot, ids in enumerate(streams):
            count = data.draw(st.integers(0, 4))
            row = ids[positions[slot] : positions[slot] + count]
            add_row(step, slot, row, positions[slot])
            positions[slot] += len(row)
        deliver_step(core_pb.StepOutputs.FromString(step.SerializeToString()), table)
        if data.draw(st.booleans()):
            for output in outputs:
                output.read()
    ends = [core_pb.Finished(slot=slot, reason=params_pb2.FINISH_REASON_LENGTH) for slot in (0, 1)]
    deliver_step(core_pb.StepOutputs(finished=ends), table)
    for ids, output in zip(streams, outputs, strict=True):
        output.read()
        expected = oracle(tokenizer, ids, stops, include, min_tokens)
        assert "".join(message.text for message in output.messages) == expected.text
        kept = [token_id for message in output.messages for token_id in message.token_ids]
        assert kept == ids[: expected.num_tokens]
        rows = [row for message in output.messages for row in message.logprobs]
        assert [(row.candidates[0].token_id, row.candidates[0].logprob) for row in rows] == [
            (token_id, -float(position)) for position, token_id in enumerate(kept)
        ]
        assert output.messages[-1].stop_text == (expected.stop or "")
        assert output.told_to_stop == (expected.stop is not None)


def add_row(step: core_pb.StepOutputs, slot: int, ids: Sequence[int], first_position: int) -> None:
    """Tokens with log-probabilities that tell their positions."""
    columns = step.logprobs
    if not columns.offsets:
        columns.offsets.append(0)
    step.slots.append(slot)
    step.counts.append(len(ids))
    step.token_ids.extend(ids)
    for offset, token_id in enumerate(ids):
        columns.slots.append(slot)
        columns.positions.append(first_position + offset)
        columns.token_ids.append(token_id)
        columns.values.append(-float(first_position + offset))
        columns.ranks.append(1)
        columns.offsets.append(len(columns.token_ids))


@given(st.lists(st.sampled_from(BYTES), max_size=8), st.lists(st.sampled_from(BYTES), max_size=4))
def test_the_oracle_takes_back_no_text_when_bytes_follow(start: list[int], more: list[int]) -> None:
    assert bytes([*start, *more]).decode("utf-8", "replace").startswith(complete_text(bytes(start)))


@given(st.text(ALPHABET, min_size=1, max_size=12), st.integers(1, 5))
def test_text_is_held_back_by_one_character_less_than_the_longest_stop(text: str, longest: int) -> None:
    """Nothing of what is held back could have been shown: it may all be the beginning of that stop string."""
    tokenizer = Tokenizer.from_files(model_files())
    output = OutputText(tokenizer, stops=["!" * longest, "?"])
    shown = "".join(output.push([byte]).text for byte in text.encode())
    assert shown == text[: max(len(text) - (longest - 1), 0)]
    assert shown + output.finish().text == text
