import pytest
from gateway_harness import RecordingSink
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.gateway.core_client import LogprobRow
from headrace.gateway.slots import SlotTable
from headrace.gateway.step_demux import deliver_step


def table_of(num_slots: int) -> tuple[SlotTable, list[RecordingSink]]:
    table, sinks = SlotTable(), [RecordingSink() for _ in range(num_slots)]
    table.allocate("id", sinks)
    return table, sinks


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), min_size=1, max_size=6))
def test_each_completion_gets_exactly_its_tokens(rows: list[list[int]]) -> None:
    table, sinks = table_of(len(rows))
    step = pb.StepOutputs(
        slots=range(len(rows)), token_ids=[t for row in rows for t in row], counts=[len(row) for row in rows]
    )
    deliver_step(step, table)
    assert [sink.events for sink in sinks] == [[("tokens", row)] for row in rows]


def test_no_counts_mean_one_token_each() -> None:
    table, sinks = table_of(3)
    deliver_step(pb.StepOutputs(slots=[2, 0], token_ids=[7, 8]), table)
    assert [sink.events for sink in sinks] == [[("tokens", [8])], [], [("tokens", [7])]]


def test_logprobs_come_before_their_tokens_and_the_terminal_row_comes_last() -> None:
    table, sinks = table_of(1)
    columns = pb.LogprobColumns(
        slots=[0], positions=[4], offsets=[0, 2], token_ids=[7, 9], values=[-1, -2], ranks=[1, 5]
    )
    step = pb.StepOutputs(
        slots=[0],
        token_ids=[7],
        logprobs=columns,
        prompt_logprobs=columns,
        finished=[pb.Finished(slot=0, reason=params_pb2.FINISH_REASON_STOP)],
    )
    deliver_step(step, table)
    row = LogprobRow([7, 9], [-1, -2], [1, 5])
    assert sinks[0].events == [
        ("prompt", (4, row)),
        ("logprobs", (4, row)),
        ("tokens", [7]),
        ("finished", params_pb2.FINISH_REASON_STOP),
    ]
    assert table.num_live == 0


@pytest.mark.parametrize(
    "step",
    [
        pb.StepOutputs(slots=[5], token_ids=[1]),
        pb.StepOutputs(finished=[pb.Finished(slot=5)]),
        pb.StepOutputs(slots=[0], token_ids=[1, 2]),
        pb.StepOutputs(slots=[0], token_ids=[1], counts=[2]),
        pb.StepOutputs(slots=[0], token_ids=[1, 2], counts=[1]),
        pb.StepOutputs(logprobs=pb.LogprobColumns(slots=[0], positions=[0], offsets=[0])),
    ],
)
def test_what_breaks_the_protocol_raises(step: pb.StepOutputs) -> None:
    table, _ = table_of(1)
    with pytest.raises((KeyError, ValueError)):
        deliver_step(step, table)
