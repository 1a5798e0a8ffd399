"""Which stop string ends an output, and where."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.stop_strings import StopMatch, StopStringMatcher

few_letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(stops: list[str], pieces: Iterable[str]) -> StopMatch | None:
    matcher = StopStringMatcher(stops)
    return next((match for piece in pieces if (match := matcher.push(piece))), None)


def oracle(stops: list[str], text: str) -> StopMatch | None:
    """Tries every end from the left, then every stop in the order of the list."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return StopMatch(stop, end - len(stop), end)
    return None


@given(stop_lists, st.lists(few_letters, max_size=6))
def test_the_match_that_completes_first_wins_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert first_match(stops, pieces) == first_match(stops, text) == first_match(stops, [text]) == oracle(stops, text)


@pytest.mark.parametrize(
    ("old", "new", "stops", "expected"),
    [
        (" The user", " is a", ["a", "is"], ("is", 10, 12)),
        (" The user", " is a", ["is", "a"], ("is", 10, 12)),
        ("", "abc", ["abc", "b"], ("b", 1, 2)),
        ("", "ab", ["ab", "b"], ("ab", 0, 2)),
        ("", "ab", ["b", "ab"], ("b", 1, 2)),
        ("x", "yz", ["q"], None),
        ("ab", "", ["b"], None),
    ],
)
def test_known_cases(old: str, new: str, stops: list[str], expected: Any) -> None:
    matcher = StopStringMatcher(stops)
    matcher.push(old, may_stop=False)
    assert matcher.push(new) == (expected and StopMatch(*expected))


def test_a_match_may_begin_but_not_complete_where_stopping_is_not_allowed() -> None:
    matcher = StopStringMatcher(["cd"])
    assert matcher.push("cdc", may_stop=False) is None
    assert matcher.push("d") == StopMatch("cd", 2, 4)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stops_are_a_bug_of_the_caller(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        StopStringMatcher(stops)
