"""EngineOutputs to the contract's StepOutputs: one set of columns for each gateway, split below the stream's size
limit."""

from collections.abc import Iterator

import numpy as np

from headrace.common.params_wire import duration
from headrace.common.v1 import params_pb2
from headrace.core_api.v1 import engine_core_pb2 as pb
from headrace.core_service.batch import Int32Array, LogprobRows
from headrace.core_service.blob_store import BlobStore
from headrace.core_service.engine_outputs import EngineOutputs, FinishedSequence
from headrace.core_service.request import ClientId

MAX_MESSAGE_BYTES = 256 * 1024
# An entry is a log-probability (a varint id, a float, a varint rank), a token (a varint slot, a varint id), or a row of
# log-probabilities (a varint slot, a varint position, a varint offset).
_BYTES_PER_ENTRY = 14
_MAX_ENTRIES = MAX_MESSAGE_BYTES // _BYTES_PER_ENTRY
_MAX_FINISHED = 512


def step_messages(
    outputs: EngineOutputs, stats: pb.SchedulerStats, blobs: BlobStore
) -> Iterator[tuple[ClientId, pb.StepOutputs]]:
    """The messages of one step, in the order in which each client must get them: tokens before terminal rows.

    Nearly every step is one message a client. Log-probabilities that are too long even alone go to `blobs`.
    """
    for client in _clients(outputs):
        messages = [*_prompt_messages(outputs, client, blobs), *_token_messages(outputs, client, blobs)]
        finished = [record for record in outputs.finished if record.sequence.request.client == client]
        for start in range(0, len(finished), _MAX_FINISHED):
            if start or not messages:
                messages.append(pb.StepOutputs())
            messages[-1].finished.extend(_finished(record) for record in finished[start : start + _MAX_FINISHED])
        messages[0].stats.CopyFrom(stats)
        for message in messages:
            message.step = stats.steps
            yield client, message


def _clients(outputs: EngineOutputs) -> list[ClientId]:
    clients = set(np.unique(outputs.clients).tolist())
    clients.update(record.sequence.request.client for record in outputs.finished)
    clients.update(record.sequence.request.client for record in outputs.prompt_logprobs)
    return sorted(clients)


def _token_messages(outputs: EngineOutputs, client: ClientId, blobs: BlobStore) -> Iterator[pb.StepOutputs]:
    mine = np.flatnonzero(outputs.clients == client)
    if not len(mine):
        return
    weights = np.ones(len(mine), np.int64)
    logprobs = outputs.logprobs
    if logprobs is not None:
        lengths = np.append(np.diff(logprobs.offsets), 0)  # the last one stands for rows without log-probabilities
        weights += lengths[outputs.logprob_rows[mine]]
    for start, end in _ranges(weights):
        rows = mine[start:end]
        message = pb.StepOutputs(slots=outputs.slots[rows].tolist(), token_ids=outputs.token_ids[rows].tolist())
        if logprobs is not None:
            asked = rows[outputs.logprob_rows[rows] >= 0]
            if len(asked):
                _fill(
                    message.logprobs,
                    logprobs,
                    outputs.logprob_rows[asked],
                    outputs.slots[asked],
                    outputs.positions[asked],
                    blobs,
                )
        yield message


def _prompt_messages(outputs: EngineOutputs, client: ClientId, blobs: BlobStore) -> Iterator[pb.StepOutputs]:
    for prompt in outputs.prompt_logprobs:
        if prompt.sequence.request.client != client:
            continue
        for start, end in _ranges(np.diff(prompt.rows.offsets) + 1):
            rows = np.arange(start, end, dtype=np.int32)
            message = pb.StepOutputs()
            slots = np.full(len(rows), prompt.sequence.slot, np.int32)
            _fill(message.prompt_logprobs, prompt.rows, rows, slots, prompt.first_position + rows, blobs)
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
    """Copies some rows of `source`; a single row that is too long for the stream becomes a blob."""
    starts, ends = source.offsets[rows], source.offsets[rows + 1]
    lengths = ends - starts
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    entries = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    columns = pb.LogprobColumns(
        slots=slots.tolist(),
        positions=positions.tolist(),
        offsets=offsets.tolist(),
        token_ids=source.token_ids[entries].tolist(),
        values=source.values[entries].tolist(),
        ranks=source.ranks[entries].tolist(),
    )
    if len(entries) > _MAX_ENTRIES:
        message.blob_digests.append(blobs.put(columns.SerializeToString()))
    else:
        message.CopyFrom(columns)


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
