"""Takes one StepOutputs message apart and hands each completion its share.

This runs once per token, so the loops are plain: the sinks of a message are looked up at once, and each is called once.
"""

from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.core_client import LogprobRow
from headrace.gateway.slots import SlotTable


def deliver_step(step: core_pb.StepOutputs, table: SlotTable) -> None:
    """Log-probabilities first, then tokens, then terminal rows, which free their slots.

    Raises KeyError for a slot that is not in use and ValueError for columns that do not fit together: the core broke
    the protocol, and the stream must end.
    """
    if step.HasField("prompt_logprobs"):
        deliver_prompt_logprobs(step.prompt_logprobs, table)
    if step.HasField("logprobs"):
        deliver_logprobs(step.logprobs, table)
    _deliver_tokens(step, table)
    for finished in step.finished:
        table.release(finished.slot).on_finished(finished)


def deliver_logprobs(columns: core_pb.LogprobColumns, table: SlotTable) -> None:
    """Rows of output positions."""
    rows = _rows(columns)
    for sink, (position, row) in zip(table.sinks(columns.slots), rows, strict=True):
        sink.on_logprobs(position, row)


def deliver_prompt_logprobs(columns: core_pb.LogprobColumns, table: SlotTable) -> None:
    """Rows of prompt positions."""
    rows = _rows(columns)
    for sink, (position, row) in zip(table.sinks(columns.slots), rows, strict=True):
        sink.on_prompt_logprobs(position, row)


def _deliver_tokens(step: core_pb.StepOutputs, table: SlotTable) -> None:
    sinks, token_ids = table.sinks(step.slots), step.token_ids[:]
    if not step.counts:
        for sink, token_id in zip(sinks, token_ids, strict=True):
            sink.on_tokens((token_id,))
        return
    counts = step.counts[:]
    if sum(counts) != len(token_ids):
        raise ValueError(f"counts add up to {sum(counts)} tokens, but the message has {len(token_ids)}")
    start = 0
    for sink, count in zip(sinks, counts, strict=True):
        sink.on_tokens(token_ids[start : start + count])
        start += count


def _rows(columns: core_pb.LogprobColumns) -> list[tuple[int, LogprobRow]]:
    token_ids, values, ranks = list(columns.token_ids), list(columns.values), list(columns.ranks)
    offsets = list(columns.offsets)
    if len(columns.slots) != len(columns.positions) or len(offsets) != (len(columns.slots) + 1 if offsets else 0):
        raise ValueError("log-probability columns have different numbers of rows")
    return [
        (position, LogprobRow(token_ids[a:b], values[a:b], ranks[a:b]))
        for position, a, b in zip(columns.positions, offsets, offsets[1:], strict=False)
    ]
