"""What a request asks to change in the logits of its draws, checked and put into one record."""

from collections.abc import Sequence

import numpy as np

from headrace.common.errors import Violation
from headrace.common.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_NAMED, SamplingParams
from headrace.core_service.batch import Int32Array, LogitEdits


def bad_word_violations(sequences: Sequence[Sequence[int]], vocab_size: int) -> list[Violation]:
    """The rules that `bad_word_ids` break: at most 128 sequences, none empty or long, ids inside the vocabulary."""
    if len(sequences) > MAX_BAD_WORDS:
        return [Violation("bad_word_ids", f"at most {MAX_BAD_WORDS} sequences; got {len(sequences)}")]
    found: list[Violation] = []
    for place, ids in enumerate(sequences):
        field = f"bad_word_ids[{place}]"
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            found.append(Violation(field, f"must be 1 to {MAX_BAD_WORD_TOKENS} ids; got {len(ids)}"))
        elif (worst := max(ids)) >= vocab_size:
            found.append(Violation(field, f"ids must be between 0 and {vocab_size - 1}; got {worst}"))
    return found[:MAX_NAMED]


def requested_edits(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> LogitEdits | None:
    """The edits that checked, normalized parameters and checked `bad_words` ask for; None if there are none."""
    bias = params.logit_bias or {}
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    if params.allowed_token_ids is None and not bad_words and not bias and penalties == (0, 0, 1):
        return None
    return LogitEdits(
        allowed_ids=None if params.allowed_token_ids is None else _ids(params.allowed_token_ids),
        bad_words=tuple(_ids(word) for word in bad_words),
        bias_ids=_ids(list(bias)),
        bias_values=np.array(list(bias.values()), np.float32),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
    )


def _ids(ids: Sequence[int]) -> Int32Array:
    return np.array(ids, np.int32)
