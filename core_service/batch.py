"""What the scheduler hands to the model runner, and what comes back: the only records that the two share.

All arrays are numpy and are built by the scheduler from its sequence table with a constant number of vector operations.
No torch here, and none in the scheduler.

A batch holds `num_seqs` sequences; sequence i contributes `query_start[i+1] - query_start[i]` new tokens, which lie
side by side in the flat arrays:

    query_start    0        3  4              9
    token_ids      a a a    b  c c c c c                 [num_tokens]
    positions      7 8 9    40 0 1 2 3 4                 [num_tokens]
    context_lens   10       41 5                         [num_seqs]   tokens in the KV cache after the step
    sample_index   2        3                            [num_samples] here c is a chunk in mid-prompt: nothing is drawn
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
FloatArray = NDArray[np.float32]

# In place of a drawn token:
NOT_FINITE = -1  # the row's logits are not finite
NOTHING_ALLOWED = -2  # what the request allows leaves no token


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes a sequence's logits before every draw; the same for all of its life."""

    allowed_ids: Int32Array | None = None  # only these may be drawn
    bad_words: tuple[Int32Array, ...] = ()  # token sequences that must not appear in the output
    bias_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # one for each of bias_ids
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def need_history(self) -> bool:
        """True if they depend on the tokens before."""
        return bool(
            self.bad_words or self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens before the one that is drawn."""

    prompt_ids: Int32Array  # [prompt_len]
    output_ids: Int32Array  # [num_output]


class GrammarMasks(Protocol):
    """Which tokens the grammars of some rows allow; worked out on other threads while the model computes."""

    @property
    def rows(self) -> Int32Array:
        """Positions in the samples, [num_rows], rising."""
        ...

    def wait(self) -> Int32Array:
        """Bit masks, int32 [num_rows, ceil(vocab_size / 32)]: token t of a row is allowed if bit t % 32 of word t // 32
        is set. Blocks until they are there."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How each sampled row is drawn; every array is [num_samples], in the order of `ScheduledBatch.sample_index`.

    Dictionaries hold what few rows have, by position in these arrays.
    """

    temperature: FloatArray  # 0 means greedy
    top_k: Int32Array  # 0 means off
    top_p: FloatArray  # 1 means off
    min_p: FloatArray  # 0 means off
    seed: UInt64Array
    output_position: Int32Array  # index of the drawn token in its output: with the seed, the key of its random number
    num_logprobs: Int32Array  # -1: none; k: the drawn token and the k most likely
    forbidden_ids: dict[int, Int32Array] = field(default_factory=dict)  # stop tokens of rows below min_tokens
    edits: dict[int, LogitEdits] = field(default_factory=dict)
    histories: dict[int, TokenHistory] = field(default_factory=dict)  # of the rows whose edits need it
    grammar: GrammarMasks | None = None
    logprob_ids: dict[int, Int32Array] = field(default_factory=dict)  # ids whose log-probabilities are wanted too


@dataclass(frozen=True, slots=True)
class PromptLogprobRange:
    """New tokens of one sequence whose logits give log-probabilities of the prompt tokens that follow them."""

    seq: int  # position in the batch
    first: int  # first flat token index
    target_ids: Int32Array  # [n] the actual next prompt token of flat tokens first .. first+n-1
    first_position: int  # prompt position of target_ids[0]
    num_logprobs: int  # the actual token and this many most likely
    more_ids: Int32Array | None = None  # ids whose log-probabilities are wanted too, at every position


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work."""

    step: int
    query_start: Int32Array  # [num_seqs + 1]
    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    slot_mapping: Int64Array  # [num_tokens] where K and V go: block id * block size + offset
    block_tables: Int32Array  # [num_seqs, most blocks of any sequence here]; unused entries are 0
    context_lens: Int32Array  # [num_seqs]
    sample_index: Int64Array  # [num_samples] flat token indices whose logits are drawn from
    sampling: SamplingColumns
    prompt_logprobs: tuple[PromptLogprobRange, ...] = ()

    @property
    def num_seqs(self) -> int:
        """Sequences in this step."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens in this step."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of several positions as flat arrays: row i has entries offsets[i] to offsets[i+1].

    The sampled (or actual) token comes first, then the most likely ones, then those asked for by id. Natural logarithms
    of the softmax of the model's raw logits (before temperature, filters and masks); rank 1 is the most likely, and of
    equally likely tokens the one with the lower id comes first. Rows whose logits give no probabilities (one is NaN or
    +inf) are missing.
    """

    rows: Int32Array  # [num_rows] positions in the samples (or, for prompts, flat token indices)
    offsets: Int32Array  # [num_rows + 1]
    token_ids: Int32Array  # [num_entries]
    values: FloatArray  # [num_entries]
    ranks: Int32Array  # [num_entries]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed for a batch."""

    token_ids: Int32Array  # [num_samples]; NOT_FINITE or NOTHING_ALLOWED: the sequence must end with an error
    logprobs: LogprobRows | None = None  # rows index the samples
    prompt_logprobs: tuple[LogprobRows, ...] = ()  # one for each PromptLogprobRange, rows 0 .. n-1
