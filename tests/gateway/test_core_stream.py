from hypothesis import given
from hypothesis import strategies as st

from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.gateway.core_stream import MAX_CONNECT_MESSAGE_BYTES, Outgoing, pack_messages


def requests() -> st.SearchStrategy[pb.EngineCoreRequest]:
    return st.builds(
        lambda name, length: pb.EngineCoreRequest(internal_id=name, prompt_token_ids=[300] * length),
        st.text("ab", min_size=1, max_size=4),
        st.sampled_from([1, 1000, 50_000, 100_000]),
    )


@given(st.lists(st.one_of(requests(), st.tuples(st.integers(0, 1000), st.text("ab", max_size=40))), max_size=12))
def test_packing_keeps_order_and_the_size_bound(waiting: list[Outgoing]) -> None:
    messages = list(pack_messages(waiting))
    unpacked: list[Outgoing] = []
    for message in messages:
        assert message.ByteSize() <= MAX_CONNECT_MESSAGE_BYTES
        unpacked += message.add.requests
        unpacked += zip(message.abort.slots, message.abort.internal_ids, strict=True)
    assert unpacked == waiting


def test_what_waits_together_travels_together() -> None:
    adds = [pb.EngineCoreRequest(internal_id=str(i)) for i in range(50)]
    assert len(list(pack_messages([*adds, (1, "1"), (2, "2")]))) == 2
