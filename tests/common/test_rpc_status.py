"""A rich status reaches the client whatever it says: it fits into the headers that a client takes, and comes back."""

from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status as grpc_rpc_status
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.errors import InvalidRequest, Overloaded, RequestError, Violation
from headrace.common.rpc_status import status_message, to_status, trailing_metadata

SOFT_LIMIT = 8 * 1024  # of all headers; gRPC clients refuse more
ROOM_FOR_OTHERS = 300

texts = st.text(st.characters(codec="utf-8")).map(lambda text: text * 50)
violations = st.lists(st.builds(Violation, texts, texts), max_size=200)


def header_bytes(error: RequestError) -> int:
    grpc_message = len(quote(status_message(error), safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"))
    details = sum(len(value) * 4 // 3 + 4 for _, value in trailing_metadata(error))
    return grpc_message + details + ROOM_FOR_OTHERS


@given(violations)
def test_any_list_of_violations_fits_into_headers(found: list[Violation]) -> None:
    assert header_bytes(InvalidRequest(found)) <= SOFT_LIMIT


@pytest.mark.parametrize("character", ["x", "%", "\x00", "é", "中", "👍", "\ud800"])
def test_any_message_fits_and_keeps_its_beginning(character: str) -> None:
    error = Overloaded("why: " + (character.encode("utf-8", "replace").decode() * 1_000_000))
    assert header_bytes(error) <= SOFT_LIMIT
    assert status_message(error).startswith("why: ")
    assert status_message(error).endswith("…")


def test_the_first_of_many_violations_are_kept_whole() -> None:
    found = [Violation(f"prompt.chat.messages[{i}].role", "must be one of system, user") for i in range(100_000)]
    bad = error_details_pb2.BadRequest()
    for detail in to_status(InvalidRequest(found)).details:
        detail.Unpack(bad)
    kept = [Violation(v.field, v.description) for v in bad.field_violations]
    assert len(kept) > 20
    assert kept[:-1] == found[: len(kept) - 1]


def test_a_short_status_is_left_as_it_is() -> None:
    found = [Violation("a.b", "must be 1; got 2"), Violation("c", "100% wrong: é")]
    error = InvalidRequest(found)
    assert status_message(error) == error.message == "a.b: must be 1; got 2; c: 100% wrong: é"
    assert dict(trailing_metadata(error)) == dict(grpc_rpc_status.to_status(to_status(error)).trailing_metadata)
