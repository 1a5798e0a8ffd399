"""EngineOutputs to the contract's StepOutputs: one set of columns for each gateway, split below the stream's limit.

They are built inside the stream's own message: putting one in later would copy every column.
"""

from collections.abc import Iterator

import numpy as np

from headrace.common.params_wire import duration
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.batch import Int32Array, Int64Array, LogprobRows
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine_outputs import EngineOutputs, FinishedSequence
from headrace.core_service.packed_columns import packed_floats, packed_integers
from headrace.core_service.request import ClientId

MAX_MESSAGE_BYTES = 256 * 1024
# An entry is a log-probability (a varint id, a float, a varint rank), a token (a varint slot, a varint id), or a row of
# log-probabilities (a varint slot, a varint position, a varint offset).
_BYTES_PER_ENTRY = 14
_MAX_ENTRIES = MAX_MESSAGE_BYTES // _BYTES_PER_ENTRY
_MAX_FINISHED = 512

_NO_ROWS = np.empty(0, np.int64)


def step_messages(
    outputs: EngineOutputs, stats: pb.SchedulerStats, blobs: BlobStore
) -> Iterator[tuple[ClientId, pb.ConnectResponse]]:
    """The messages of one step, each with `step` set, in the order in which each client must get them: tokens before
    terminal rows.

    Nearly every step is one message a client. Log-probabilities that are too long even alone go to `blobs`.
    """
    for client, mine in sorted(_tokens_by_client(outputs).items()):
        messages = [*_prompt_messages(outputs, client, blobs), *_token_messages(outputs, mine, blobs)]
        finished = [record for record in outputs.finished if record.sequence.request.client == client]
        for start in range(0, len(finished), _MAX_FINISHED):
            if start or not messages:
                messages.append(pb.ConnectResponse())
            messages[-1].step.finished.extend(_finished(record) for record in finished[start : start + _MAX_FINISHED])
        messages[0].step.stats.CopyFrom(stats)
        for message in messages:
            message.step.step = stats.steps
            yield client, message


def _tokens_by_client(outputs: EngineOutputs) -> dict[ClientId, Int64Array]:
    """Where each client's tokens lie in the columns; none for who gets something else only."""
    column = outputs.clients
    found: dict[ClientId, Int64Array] = {}
    if len(column) and (column == column[0]).all():  # nearly always
        found[int(column[0])] = np.arange(len(column))
    else:
        found.update((client, np.flatnonzero(column == client)) for client in set(column.tolist()))
    for sequence in [*(one.sequence for one in outputs.finished), *(one.sequence for one in outputs.prompt_logprobs)]:
        found.setdefault(sequence.request.client, _NO_ROWS)
    return found


def _token_messages(outputs: EngineOutputs, mine: Int64Array, blobs: BlobStore) -> Iterator[pb.ConnectResponse]:
    for rows in _runs(outputs, mine):
        slots = outputs.slots[rows]
        message = pb.ConnectResponse()
        message.step.slots.extend(slots.tolist())
        message.step.token_ids.extend(outputs.token_ids[rows].tolist())
        if outputs.logprobs is not None:
            logprob_rows = outputs.logprob_rows[rows]
            asked = np.flatnonzero(logprob_rows >= 0)
            if len(asked):
                positions = outputs.positions[rows][asked]
                _fill(message.step.logprobs, outputs.logprobs, logprob_rows[asked], slots[asked], positions, blobs)
        yield message


def _runs(outputs: EngineOutputs, mine: Int64Array) -> Iterator[Int64Array]:
    """A client's tokens in runs that fit into a message each."""
    logprobs = outputs.logprobs
    if logprobs is None:
        for start in range(0, len(mine), _MAX_ENTRIES):
            yield mine[start : start + _MAX_ENTRIES]
        return
    lengths = np.append(np.diff(logprobs.offsets), 0)  # the last one stands for rows without log-probabilities
    for start, end in _ranges(lengths[outputs.logprob_rows[mine]] + 1):
        yield mine[start:end]


def _prompt_messages(outputs: EngineOutputs, client: ClientId, blobs: BlobStore) -> Iterator[pb.ConnectResponse]:
    for prompt in outputs.prompt_logprobs:
        if prompt.sequence.request.client != client:
            continue
        for start, end in _ranges(np.diff(prompt.rows.offsets) + 1):
            rows = np.arange(start, end, dtype=np.int32)
            message = pb.ConnectResponse()
            slots = np.full(len(rows), prompt.sequence.slot, np.int32)
            _fill(message.step.prompt_logprobs, prompt.rows, rows, slots, prompt.first_position + rows, blobs)
            yield message


def _ranges(weights: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs that weigh at most _MAX_ENTRIES; a heavier row is a run of its own."""
    total = np.cumsum(weights)
    start = 0
    while start < len(weights):
        before = total[start] - weights[start]
        end = max(start + 1, int(np.searchsorted(total, before + _MAX_ENTRIES, side="right")))
        yield start, end
        start = end


def _fill(
    message: pb.LogprobColumns,
    source: LogprobRows,
    rows: Int32Array,
    slots: Int32Array,
    positions: Int32Array,
    blobs: BlobStore,
) -> None:
    """Copies some rows of `source`, in their order; a single row that is too long for the stream becomes a blob."""
    starts, ends = source.offsets[rows], source.offsets[rows + 1]
    lengths = ends - starts
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    entries: slice | Int64Array = slice(int(starts[0]), int(ends[-1]))
    if (starts[1:] != ends[:-1]).any():  # they do not lie side by side
        entries = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    columns = (
        packed_integers(message.SLOTS_FIELD_NUMBER, slots)
        + packed_integers(message.POSITIONS_FIELD_NUMBER, positions)
        + packed_integers(message.OFFSETS_FIELD_NUMBER, offsets)
        + packed_integers(message.TOKEN_IDS_FIELD_NUMBER, source.token_ids[entries])
        + packed_floats(message.VALUES_FIELD_NUMBER, source.values[entries])
        + packed_integers(message.RANKS_FIELD_NUMBER, source.ranks[entries])
    )
    if offsets[-1] > _MAX_ENTRIES:
        message.blob_digests.append(blobs.put(pb.LogprobColumns.FromString(columns).SerializeToString()))
    else:
        message.MergeFromString(columns)


def _finished(record: FinishedSequence) -> pb.Finished:
    sequence = record.sequence
    message = pb.Finished(
        slot=sequence.slot,
        reason=record.reason,
        cached_tokens=sequence.request.cached_tokens,
        timing=_timing(record),
        code=record.code,
        message=record.message,
        retryable=record.retryable,
    )
    if record.stop_token_id is not None:
        message.stop_token_id = record.stop_token_id
    return message


def _timing(record: FinishedSequence) -> params_pb2.Timing:
    sequence = record.sequence
    timing = params_pb2.Timing(preemptions=sequence.preemptions)
    if sequence.first_scheduled is not None:
        timing.queue.CopyFrom(duration(sequence.first_scheduled - sequence.request.received))
        if sequence.first_token is not None:
            timing.prefill.CopyFrom(duration(sequence.first_token - sequence.first_scheduled))
            timing.decode.CopyFrom(duration(sequence.last_token - sequence.first_token))
    return timing
