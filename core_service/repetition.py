"""Outputs that repeat themselves."""

import numpy as np

from headrace.common.params import MAX_REPETITION_SPAN, RepetitionDetectionParams
from headrace.core_service.batch import Int32Array

# Weights of a polynomial hash modulo 2**64: 1, B, B**2, ... Any odd B with well mixed bits will do.
_POWERS = np.cumprod(np.array([1] + [0x9E3779B97F4A7C15] * MAX_REPETITION_SPAN, np.uint64))


def ends_in_repetition(output: Int32Array, rule: RepetitionDetectionParams) -> bool:
    """True if `output` [n] ends with `min_count` copies of a pattern of `min_pattern_size` to `max_pattern_size`
    tokens. The rule's `max_pattern_size * min_count` is at most `MAX_REPETITION_SPAN`.

    An output ends with m copies of p tokens if its last (m - 1) p tokens equal those p places before. Hashes of all
    such spans come from one running sum, so the cost hardly depends on how many sizes there are or nearly fit; a span
    whose hash fits is then compared token by token.
    """
    longest = min(rule.max_pattern_size, len(output) // rule.min_count)
    sizes = np.arange(rule.min_pattern_size, longest + 1)
    last_first = output[len(output) - longest * rule.min_count :][::-1]
    if not (last_first[sizes] == last_first[:1]).any():  # most outputs do not even repeat their last token
        return False
    hashes = np.append(np.uint64(0), np.cumsum(last_first.astype(np.uint64) * _POWERS[: len(last_first)]))
    spans = sizes * (rule.min_count - 1)
    likely = hashes[sizes + spans] - hashes[sizes] == hashes[spans] * _POWERS[sizes]
    for size, span in zip(sizes[likely].tolist(), spans[likely].tolist(), strict=True):
        if (last_first[:span] == last_first[size : size + span]).all():
            return True
    return False
