"""Text of every kind, streamed back one token at a time by a gateway over real gRPC.

The core is a fake that says exactly the scripted ids, one a step; the tokenizer is the demo model's. What the whole
text must be is told by the `tokenizers` library, which the gateway does not use to decode.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Client, Outcome, running_gateway, serving
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pair_requests import make_request, whole_ids, whole_text
from tokenizers import Tokenizer

from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.gateway.fakes import FakeBehaviour, FakeCore, fake_core_info, serve_fake_core
from headrace.gateway.tokenizer import Tokenizer as GatewayTokenizer
from headrace.gateway_api.v1 import generation_pb2 as pb

KINDS = [pb.OUTPUT_KIND_DELTA, pb.OUTPUT_KIND_CUMULATIVE, pb.OUTPUT_KIND_FINAL_ONLY]
STRINGS = [json.loads(line) for line in Path("tests/data/strings.jsonl").read_text(encoding="utf-8").splitlines()]
VOCAB_SIZE = 49152
MAX_LEN = 4096
REPLACEMENT = "\ufffd"

pytestmark = pytest.mark.model


class Echo:
    """A gateway that streams back whatever ids it is told, on an event loop that runs while it is asked."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._behaviour = FakeBehaviour(next_token=lambda last, _seed: last)
        self._client: Client | None = None
        files = load_tokenizer_files(resolve_model("demo").path)
        self.library: Tokenizer = files.build_tokenizer()
        self._core = FakeCore(files, fake_core_info(files, max_model_len=MAX_LEN, num_blocks=10_000), self._behaviour)
        token_bytes = GatewayTokenizer.from_files(files).token_bytes
        self.ids_of_bytes = {piece[0]: i for i in range(VOCAB_SIZE) if len(piece := token_bytes(i)) == 1}

    def __enter__(self) -> "Echo":
        self._runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()
        assert self._core.breaches == []

    def stream(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> dict[pb.OutputKind.ValueType, Outcome]:
        """The outcome of each output kind; all three are asked for at once."""
        self._behaviour.script = list(ids)
        outcomes = self._runner.run(self._stream(len(ids), skip_special_tokens))
        return dict(zip(KINDS, outcomes, strict=True))

    def tokenize(self, text: str) -> list[int]:
        request = pb.TokenizeRequest(prompt=pb.Prompt(text=text), add_special_tokens=False)

        async def ask() -> Any:
            return await self._stubs.generation.Tokenize(request)

        return list(self._runner.run(ask()).token_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    async def _start(self) -> None:
        address = await self._stack.enter_async_context(serve_fake_core(self._core))
        gateway = await self._stack.enter_async_context(running_gateway(address))
        self._client = gateway.client
        await serving(gateway.client)

    async def _stream(self, count: int, skip_special_tokens: bool) -> list[Outcome]:
        requests = [make_request([1], kind=kind, max_tokens=count, ignore_eos=True) for kind in KINDS]
        for request in requests:
            request.text_options.skip_special_tokens = skip_special_tokens
        return await asyncio.gather(*map(self._stubs.generate, requests))

    @property
    def _stubs(self) -> Client:
        assert self._client is not None
        return self._client


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with Echo() as running:
        yield running


def assert_streams_right(echo: Echo, ids: Sequence[int], *, skip_special_tokens: bool = False) -> None:
    whole = echo.decode(ids, skip_special_tokens=skip_special_tokens)
    for kind, outcome in echo.stream(ids, skip_special_tokens=skip_special_tokens).items():
        assert outcome.error is None
        assert whole_text(outcome, kind) == whole
        assert whole_ids(outcome, kind) == list(ids)
        outputs = [output for message in outcome.messages for output in message.outputs]
        shown, shown_ids = "", list[int]()
        for output in outputs[:-1]:
            if kind == pb.OUTPUT_KIND_DELTA:
                shown, shown_ids = shown + output.text, shown_ids + list(output.token_ids)
            else:
                shown, shown_ids = output.text, list(output.token_ids)
            # Half a character, or a U+FFFD for it, would not be there in the whole.
            assert whole.startswith(shown)
            assert shown_ids == list(ids[: len(shown_ids)])
            # Ids are never ahead of their text: what they say is shown in full.
            assert shown.startswith(echo.decode(shown_ids, skip_special_tokens=skip_special_tokens))
        if kind == pb.OUTPUT_KIND_CUMULATIVE:
            assert all(after.text.startswith(before.text) for before, after in pairwise(outputs))
        if kind == pb.OUTPUT_KIND_FINAL_ONLY:
            assert len(outputs) == 1


@pytest.mark.parametrize("case", STRINGS, ids=[ascii(case["text"])[:30] for case in STRINGS])
def test_reference_strings_come_back_as_they_went_in(echo, case):
    assert echo.tokenize(case["text"]) == case["token_ids"]
    assert echo.decode(case["token_ids"]) == case["decoded"]
    assert_streams_right(echo, case["token_ids"])


def assert_text_comes_back(echo: Echo, text: str) -> None:
    """Characters that the demo model's vocabulary cannot say are left out: it lacks tokens for a few bytes."""
    text = "".join(character for character in text if set(character.encode()) <= set(echo.ids_of_bytes))
    assume(text)
    ids = echo.tokenize(text)
    assert echo.decode(ids) == text
    assert_streams_right(echo, ids)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(min_size=1, max_size=60))
def test_random_bytes_as_text_come_back_without_new_replacement_characters(echo, data):
    assert_text_comes_back(echo, data.decode("utf-8", "replace"))


@settings(max_examples=150, deadline=None)
@given(text=st.text(min_size=1, max_size=40))
def test_random_text_comes_back_as_it_went_in(echo, text):
    assert_text_comes_back(echo, text)


# Whole characters, their beginnings and ends, and bytes that no character has.
pieces_of_characters = st.characters(min_codepoint=0x80).flatmap(
    lambda character: st.sampled_from(
        [encoded[start:end] for encoded in [character.encode()] for end in range(5) for start in range(end)] or [b"a"]
    )
)


@settings(max_examples=150, deadline=None)
@given(runs=st.lists(st.one_of(st.binary(max_size=6), pieces_of_characters), min_size=1, max_size=12))
def test_random_bytes_as_single_tokens_show_no_half_characters(echo, runs):
    """One token a byte, so that every character of several bytes is cut at every place."""
    ids = [echo.ids_of_bytes[byte] for byte in b"".join(runs) if byte in echo.ids_of_bytes] or [1]
    assert_streams_right(echo, ids)


def test_bytes_of_all_common_characters_have_tokens_of_their_own(echo):
    """Else the test before would test less than it says: every byte of characters up to U+FFFF and of emoji."""
    codes = [*range(0x20, 0xD800), *range(0xE000, 0x10000), *range(0x1F000, 0x20000)]
    assert {byte for code in codes for byte in chr(code).encode()} <= set(echo.ids_of_bytes)


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, VOCAB_SIZE - 1), st.integers(0, 260)), min_size=1, max_size=60),
    skip_special_tokens=st.booleans(),
)
def test_random_token_sequences_join_to_their_full_decode(echo, ids, skip_special_tokens):
    """The first few hundred ids are special tokens and single bytes."""
    assert_streams_right(echo, ids, skip_special_tokens=skip_special_tokens)


def test_an_output_that_ends_inside_a_character_shows_it_once_and_only_at_the_end(echo):
    half = [echo.ids_of_bytes[byte] for byte in "👍".encode()[:3]]
    outcome = echo.stream([*echo.tokenize("ok "), *half])[pb.OUTPUT_KIND_DELTA]
    assert outcome.text() == "ok " + REPLACEMENT
    assert REPLACEMENT not in "".join(o.text for m in outcome.messages[:-1] for o in m.outputs)
