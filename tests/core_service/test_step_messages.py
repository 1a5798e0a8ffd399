"""What gateways read in a step's messages is what the step produced: to each its own, in order, once."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service import step_messages as module
from headrace.core_service.batch import LogprobRows, StepResult
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine_outputs import EngineOutputs
from headrace.core_service.step_messages import step_messages

# One row a token: (client, slot, token, position in the output, its log-probabilities or None)
ENTRY = st.tuples(st.integers(0, 2**31 - 1), st.floats(-1024, 0, width=32), st.integers(1, 2**31 - 1))
TOKEN = st.tuples(
    st.integers(1, 3),
    st.integers(0, 2**20),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.none() | st.lists(ENTRY, min_size=1, max_size=4),
)


def engine_outputs(tokens, order):
    """`order`: where in the columns of log-probabilities each row that has some lies."""
    outputs = EngineOutputs()
    columns = np.array([token[:4] for token in tokens], np.int32).reshape(-1, 4).T
    delivered = np.ones(len(tokens), bool)
    rows = [i for i in order if tokens[i][4] is not None]
    entries = [entry for i in rows for entry in tokens[i][4]]
    logprobs = LogprobRows(
        rows=np.array(rows, np.int32),
        offsets=np.cumsum([0, *(len(tokens[i][4]) for i in rows)]).astype(np.int32),
        token_ids=np.array([entry[0] for entry in entries], np.int32),
        values=np.array([entry[1] for entry in entries], np.float32),
        ranks=np.array([entry[2] for entry in entries], np.int32),
    )
    client, slot, token_ids, positions = columns
    draws: Any = SimpleNamespace(client=client, slot=slot)  # of its facts, the ones that are read
    outputs.set_tokens(draws, positions, StepResult(token_ids, logprobs if rows else None), delivered)
    return outputs


def read(columns):
    """(slot, position, entries) for each row, in the order of the message."""
    bounds = list(columns.offsets)
    entries = list(zip(columns.token_ids, columns.values, columns.ranks, strict=True))
    rows = zip(columns.slots, columns.positions, bounds, bounds[1:], strict=False)
    return [(slot, position, entries[start:end]) for slot, position, start, end in rows]


@given(st.lists(TOKEN, max_size=12), st.randoms(use_true_random=False), st.sampled_from([4, 9, 20_000]))
def test_what_gateways_read_is_what_the_step_produced(tokens, choices, most_entries):
    order = list(range(len(tokens)))
    choices.shuffle(order)
    outputs = engine_outputs(tokens, order)
    blobs = BlobStore(1 << 20)
    got: dict[int, tuple[list[Any], list[Any]]] = {client: ([], []) for client in (1, 2, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_ENTRIES", most_entries)
        for client, message in step_messages(outputs, pb.SchedulerStats(steps=7), blobs):
            step = pb.ConnectResponse.FromString(message.SerializeToString()).step
            assert step.step == 7
            got[client][0].extend(zip(step.slots, step.token_ids, strict=True))
            got[client][1].extend(read(step.logprobs))
            for digest in step.logprobs.blob_digests:
                got[client][1].extend(read(pb.LogprobColumns.FromString(blobs.get(digest))))
            assert len(step.logprobs.token_ids) <= most_entries
    for client, (ids, rows) in got.items():
        mine = [token for token in tokens if token[0] == client]
        assert ids == [(slot, token_id) for _, slot, token_id, _, _ in mine]
        assert rows == [(slot, position, entries) for _, slot, _, position, entries in mine if entries is not None]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_rows_of_log_probabilities_may_lie_in_any_order(order):
    tokens = [(1, slot, 5, 2, [(slot, -1.0, 1)]) for slot in range(4)]
    ((_, message),) = step_messages(engine_outputs(tokens, order), pb.SchedulerStats(), BlobStore(1))
    assert list(message.step.logprobs.token_ids) == [0, 1, 2, 3]


def test_log_probabilities_are_what_protobuf_itself_would_send():
    """A core's message, parsed and sent on, has the usual form, though its columns were not packed by protobuf."""
    outputs = engine_outputs([(1, 300, 5, 2, [(49_000, -0.5, 1), (7, -1.5, 20_000)])], [0])
    ((_, message),) = step_messages(outputs, pb.SchedulerStats(), BlobStore(1))
    expected = pb.LogprobColumns(
        slots=[300], positions=[2], offsets=[0, 2], token_ids=[49_000, 7], values=[-0.5, -1.5], ranks=[1, 20_000]
    )
    assert message.step.logprobs == expected
    assert message.step.logprobs.SerializeToString() == expected.SerializeToString()
