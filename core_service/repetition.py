"""Outputs that repeat themselves."""

from headrace.common.params import RepetitionDetectionParams
from headrace.core_service.batch import Int32Array


def ends_in_repetition(output: Int32Array, rule: RepetitionDetectionParams) -> bool:
    """True if `output` [n] ends with `min_count` repeats of a pattern of `min_pattern_size` to `max_pattern_size`
    tokens."""
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        span = size * rule.min_count
        if span > len(output):
            return False
        tail = output[len(output) - span :]
        if (tail[size:] == tail[:-size]).all():
            return True
    return False
