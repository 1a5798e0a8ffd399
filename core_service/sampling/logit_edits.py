"""What is done to the logits of a row before anything is drawn from it.

    grammar mask  ->  allowed ids  ->  bad words  ->  stop tokens below min_tokens, bias  ->  penalties

Penalties are those of vLLM, in its order, on tokens that occurred, with c the number of times in the output:

    repetition (prompt and output)   x / r if x > 0 else x * r
    frequency (output)               x - f * c
    presence (output)                x - p

Every step is one float32 operation on single logits, so a row's edited logits depend on nothing but its own logits,
edits and history. An edit never makes a finite logit infinite: what would pass the end of float32 stays at the end.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core_service.batch import (
    FloatArray,
    Int32Array,
    Int64Array,
    LogitEdits,
    SamplingColumns,
    TokenHistory,
)

_HIGHEST = np.finfo(np.float32).max
# What is added to the logits of 8 tokens for each value of their 8 mask bits: several times as fast as a masked fill.
_OF_MASK_BYTE = torch.from_numpy(
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
        np.float32
    )
)  # [256, 8]
_NOTHING = TokenHistory(prompt_ids=np.empty(0, np.int32), output_ids=np.empty(0, np.int32))


def edited_rows(columns: SamplingColumns) -> NDArray[np.bool_]:
    """Mask [num_samples] of the rows whose logits are changed by more than a grammar."""
    edited = np.zeros(len(columns.temperature), dtype=np.bool_)
    edited[list(columns.forbidden_ids)] = True
    edited[list(columns.edits)] = True
    return edited


def edit_logits_(work: Tensor, rows: Int64Array, columns: SamplingColumns, masks: Int32Array | None = None) -> None:
    """Edits `work`, float32 [num_rows, padded vocab] in host memory: copied logits of `rows` of the batch, none of them
    NaN or +inf.

    `masks` are the grammars' bit masks of these rows, int32 [num_rows, ceil(vocab / 32)] and contiguous; None if they
    have none. Their last bits may lie in the padding, which is -inf anyway.
    """
    if masks is not None:
        _apply_masks_(work, masks)
    values = work.numpy()
    for logits, row in zip(values, rows.tolist(), strict=True):
        edits, forbidden = columns.edits.get(row), columns.forbidden_ids.get(row)
        history = columns.histories.get(row, _NOTHING)
        if edits is not None:
            _forbid_(logits, edits, history)
        if forbidden is not None:
            logits[forbidden] = -np.inf
        if edits is not None:
            _shift_(logits, edits, history)


def _apply_masks_(work: Tensor, masks: Int32Array) -> None:
    mask_bytes = torch.from_numpy(masks.view(np.uint8)).int()  # lowest tokens first: hosts are little-endian
    added = torch.nn.functional.embedding(mask_bytes, _OF_MASK_BYTE).flatten(1)  # [num_rows, 32 * words]
    work[:, : added.shape[1]] += added


def _forbid_(logits: FloatArray, edits: LogitEdits, history: TokenHistory) -> None:
    """Tokens outside the allowed ids, and last tokens of bad words whose other tokens the output ends with."""
    if edits.allowed_ids is not None:
        allowed = logits[edits.allowed_ids]
        logits.fill(-np.inf)
        logits[edits.allowed_ids] = allowed
    if edits.bad_words:
        longest = max(map(len, edits.bad_words))
        tail = history.output_ids[-longest:].tobytes()
        endings = [word[-1] for word in edits.bad_words if tail.endswith(word[:-1].tobytes())]
        logits[endings] = -np.inf


def _shift_(logits: FloatArray, edits: LogitEdits, history: TokenHistory) -> None:
    """Bias and penalties. A token that occurred several times is written several times, with the same value."""
    if len(edits.bias_ids):
        logits[edits.bias_ids] += edits.bias_values
    if edits.repetition_penalty != 1:
        seen = np.concatenate([history.prompt_ids, history.output_ids])
        logits[seen] = _repetition_penalized(logits[seen], np.float32(edits.repetition_penalty))
    if edits.frequency_penalty != 0 or edits.presence_penalty != 0:
        output = history.output_ids
        penalized = logits[output]
        if edits.frequency_penalty != 0:
            counts = np.bincount(output)[output].astype(np.float32)
            penalized -= np.float32(edits.frequency_penalty) * counts
        logits[output] = penalized - np.float32(edits.presence_penalty)


def _repetition_penalized(values: FloatArray, penalty: np.float32) -> FloatArray:
    with np.errstate(over="ignore"):
        penalized = np.where(values > 0, values / penalty, values * penalty)
    bounded: FloatArray = np.where(values == -np.inf, values, np.clip(penalized, -_HIGHEST, _HIGHEST))
    return bounded
