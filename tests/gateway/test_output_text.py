"""One completion's text: detokenization and stop strings together, against a simple oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.byte_tokenizer import EOS_ID, byte_tokenizer_files
from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files
from headrace.gateway.output_text import OutputText, TextDelta
from headrace.gateway.tokenizer import Tokenizer

MERGES = [(b"c", b"d"), (b"\xc3", b"\xa9"), (b"a", b"\xc3"), (b"\xa9", b"b")]
TOKENIZER = Tokenizer.from_files(byte_tokenizer_files(merges=MERGES))
CD_ID = 258

# Bytes of "abcdé", the tokens made of them, a special token and an id without text.
few_tokens = st.lists(st.sampled_from([*b"abcd", 0xC3, 0xA9, 258, 259, 260, 261, EOS_ID, 10_000]), max_size=25)
stop_lists = st.lists(st.text("abcdé\ufffd", min_size=1, max_size=4), max_size=3)


@dataclass
class Output:
    text: str
    ids: list[int]
    stop: str | None
    deltas: list[TextDelta]


def run(groups: Sequence[Sequence[int]], *, ends_with_stop_token: bool = False, **options: Any) -> Output:
    """Pushes all groups and joins what comes back, as a client of deltas does."""
    output = OutputText(TOKENIZER, **options)
    deltas = []
    for position, group in enumerate(groups):
        last = position == len(groups) - 1
        deltas.append(output.push(group, ends_with_stop_token=ends_with_stop_token and last))
        if deltas[-1].stop_text is not None:
            break
    else:
        deltas.append(output.finish())
    ids = [i for group in groups for i in group]
    return Output(
        "".join(delta.text for delta in deltas),
        ids[: sum(delta.num_token_ids for delta in deltas)],
        deltas[-1].stop_text,
        deltas,
    )


def text_after(ids: Sequence[int], count: int) -> tuple[bytes, str]:
    """Text of the first `count` ids without an incomplete character at the end."""
    data = b"".join(TOKENIZER.pieces(True)[i] if i < TOKENIZER.vocab_size else b"" for i in ids[:count])
    return data, data.decode("utf-8", "replace")


def complete(data: bytes) -> str:
    """Text of bytes that may go on; only two-byte characters occur here, so one byte at most is the start of one."""
    return data.removesuffix(b"\xc3").decode("utf-8", "replace")


def oracle(
    ids: Sequence[int], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, Sequence[int], str | None]:
    """Looks at the whole text again after every token."""
    seen = 0
    for count in range(1, len(ids) + 1):
        text = complete(text_after(ids, count)[0])
        for end in range(seen + 1, len(text) + 1) if count > min_tokens else ():
            for stop in stops:
                if text[:end].endswith(stop):
                    return text[: end if include_stop else end - len(stop)], ids[:count], stop
        seen = len(text)
    return text_after(ids, len(ids))[1], ids, None


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[i] for i in ids]


@given(few_tokens, stop_lists, st.booleans(), st.integers(0, 6), st.lists(st.integers(0, 25), max_size=4))
def test_text_ids_and_stop_are_those_of_the_oracle_however_tokens_are_grouped(
    ids: Sequence[int], stops: list[str], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    options: dict[str, Any] = {"stops": stops, "include_stop": include, "min_tokens": min_tokens}
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    groups = [ids[start:end] for start, end in pairwise(edges)]
    expected = oracle(ids, stops, include, min_tokens)
    for output in (run(one_by_one(ids), **options), run([ids], **options), run(groups, **options)):
        assert (output.text, output.ids, output.stop) == expected


@given(few_tokens, stop_lists, st.booleans())
def test_nothing_that_was_shown_is_taken_back_and_ids_are_never_ahead_of_text(
    ids: Sequence[int], stops: list[str], include: bool
) -> None:
    output = run(one_by_one(ids), stops=stops, include_stop=include)
    shown, num_ids = "", 0
    for delta in output.deltas[:-1]:
        shown += delta.text
        num_ids += delta.num_token_ids
        assert output.text.startswith(shown)
        assert len(text_after(ids, num_ids)[1]) <= len(shown)


@given(few_tokens)
def test_without_stops_text_is_shown_at_once(ids: Sequence[int]) -> None:
    output = OutputText(TOKENIZER)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += output.push([token_id]).text
        assert shown == complete(text_after(ids, count)[0])


def test_text_that_may_become_a_stop_is_held_back() -> None:
    output = OutputText(TOKENIZER, stops=["xyz"])
    assert output.push(b"abx") == TextDelta("a", 1)
    assert output.push(b"y") == TextDelta("b", 1)
    assert output.push(b"q") == TextDelta("x", 1)
    assert output.finish() == TextDelta("yq", 2)


def test_text_is_not_held_back_where_the_stop_stays() -> None:
    output = OutputText(TOKENIZER, stops=["xyz"], include_stop=True)
    assert output.push(b"abxy") == TextDelta("abxy", 4)
    assert output.push(b"z!") == TextDelta("z", 1, "xyz")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_wins_over_the_stop_token_that_follows(include: bool, text: str) -> None:
    output = run([[*b"abcde", EOS_ID]], ends_with_stop_token=True, stops=["cd"], include_stop=include)
    assert (output.text, output.ids, output.stop) == (text, list(b"abcd"), "cd")


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, None)])
@pytest.mark.parametrize("groups", [[b"cdcdx"], [b"c", b"dcdx"], [b"cdcd", b"x"]])
def test_no_stop_completes_within_min_tokens(min_tokens: int, kept: int | None, groups: Any) -> None:
    output = run([list(group) for group in groups], stops=["cd"], min_tokens=min_tokens)
    assert output.ids == list(b"cdcdx")[:kept]
    assert output.stop == (None if kept is None else "cd")
    assert output.text == ("cdcdx" if kept is None else "cdcdx"[: kept - 2])


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "acd")])
def test_a_stop_inside_a_token_cuts_it_and_keeps_its_id(include: bool, text: str) -> None:
    ids = [*b"a", CD_ID, *b"x"]
    output = run([ids], stops=["cd"], include_stop=include)
    assert (output.text, output.ids) == (text, ids[:2])
    inside = run([ids], stops=["d"], include_stop=include)
    assert (inside.text, inside.ids) == ("acd" if include else "ac", ids[:2])


def test_tokens_without_text_are_counted() -> None:
    none = 10_000
    ids = [*b"ab", none, *b"c", none, *b"d", none, *b"ef"]
    output = run([ids], stops=["d"])
    assert (output.text, output.ids) == ("abc", ids[:6])


@pytest.mark.parametrize(
    ("token", "include", "skip_special", "text"),
    [
        (EOS_ID, False, True, "ab"),
        (EOS_ID, True, True, "ab"),
        (EOS_ID, False, False, "ab"),
        (EOS_ID, True, False, "ab<eos>"),
        (ord("Z"), False, True, "ab"),
        (ord("Z"), True, True, "abZ"),
    ],
)
def test_the_stop_token_has_text_only_where_stops_are_included(
    token: int, include: bool, skip_special: bool, text: str
) -> None:
    output = run([[*b"ab", token]], ends_with_stop_token=True, include_stop=include, skip_special_tokens=skip_special)
    assert (output.text, output.ids) == (text, [*b"ab", token])


def test_ids_of_half_a_character_wait_for_the_other_half() -> None:
    output = OutputText(TOKENIZER)
    assert output.push([0x61, 0xC3]) == TextDelta("a", 1)
    assert output.push([0xA9]) == TextDelta("é", 2)
    assert output.push([0xC3]) == TextDelta("", 0)
    assert output.finish() == TextDelta("\ufffd", 1)


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_files(load_tokenizer_files(resolve_model("demo").path))


@pytest.mark.model
@pytest.mark.parametrize(("include", "text"), [(False, " or"), (True, " organi")])
def test_a_stop_inside_a_real_token_cuts_it(demo_tokenizer: Tokenizer, include: bool, text: str) -> None:
    ids = demo_tokenizer.encode(" organization of")
    assert demo_tokenizer.token_bytes(ids[0]) == b" organization"
    output = OutputText(demo_tokenizer, stops=["gani"], include_stop=include)
    assert output.push(ids) == TextDelta(text, 1, "gani")


@pytest.mark.model
def test_with_real_tokens_no_stop_completes_within_min_tokens(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("There were seven elephants beside the edge of the river, we are told.")
    for min_tokens in range(len(ids) - 2):
        before = demo_tokenizer.decode(ids[:min_tokens], continues_text=True)
        text = demo_tokenizer.decode(ids, continues_text=True)
        output = OutputText(demo_tokenizer, stops=["e"], min_tokens=min_tokens)
        delta = output.push(ids)
        assert delta.text == text[: text.index("e", len(before))]
        assert delta.num_token_ids > min_tokens


@pytest.mark.model
@pytest.mark.parametrize("text", ["URGENCY🌶️", "ပုံပြင်လေးပြောပြပါ။", "a‍🧑‍🚀��"])
@pytest.mark.parametrize("stop", ["", "!!", "🌶", "ပြော"])
def test_text_of_many_bytes_a_character_streams_whole(demo_tokenizer: Tokenizer, text: str, stop: str) -> None:
    output = OutputText(demo_tokenizer, stops=[stop] if stop else [])
    shown = ""
    for token_id in demo_tokenizer.encode(text):
        delta = output.push([token_id])
        shown += delta.text
        assert text.startswith(shown)
        if delta.stop_text is not None:
            break
    else:
        shown += output.finish().text
    assert shown == (text.partition(stop)[0] if stop else text)


def test_going_on_after_the_end_is_a_bug_of_the_caller() -> None:
    output = OutputText(TOKENIZER, stops=["a"])
    output.push(b"a")
    with pytest.raises(RuntimeError, match="over"):
        output.push(b"b")
    with pytest.raises(RuntimeError, match="over"):
        output.finish()
