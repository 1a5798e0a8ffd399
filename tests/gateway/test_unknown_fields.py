import pytest

from headrace.gateway.unknown_fields import unknown_fields
from headrace.gateway_api.v1 import generation_pb2 as pb

UNKNOWN = b"\xa0\x38\x01"  # field 900, varint 1


def test_a_known_request_has_none() -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), output_kind=pb.OUTPUT_KIND_DELTA)
    request.sampling.logit_bias[3] = 1.0
    assert unknown_fields(request) == []


@pytest.mark.parametrize(
    ("wire", "path"),
    [
        (UNKNOWN, "900"),
        (b"\x12" + bytes([len(UNKNOWN)]) + UNKNOWN, "prompt.900"),
        # prompt (2) { chat (3) { messages (1) {}, messages (1) { 900 } } }
        (b"\x12\x09\x1a\x07\x0a\x00\x0a\x03" + UNKNOWN, "prompt.chat.messages[1].900"),
        (b"\x28\x2a", "output_kind"),
    ],
)
def test_an_unknown_field_is_named_by_its_path(wire: bytes, path: str) -> None:
    assert [violation.field for violation in unknown_fields(pb.GenerateRequest.FromString(wire))] == [path]


def test_a_repeated_unknown_field_is_named_once() -> None:
    assert len(unknown_fields(pb.GenerateRequest.FromString(UNKNOWN * 3))) == 1
