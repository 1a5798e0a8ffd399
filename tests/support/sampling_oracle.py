"""Rows of sampling parameters, and the sampler's law written out in plain Python."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core_service.batch import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    Int32Array,
    LogitEdits,
    SamplingColumns,
    TokenHistory,
)
from headrace.core_service.sampling.sampler import Sampler
from headrace.core_service.sampling.token_weights import LARGEST_WEIGHT, rates, weigh_few

FloatRow = NDArray[np.float32]
INF = float("inf")


@dataclass(frozen=True, slots=True)
class RowParams:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    num_logprobs: int = -1
    forbidden: tuple[int, ...] = ()
    logprob_ids: tuple[int, ...] = ()
    in_grammar: tuple[int, ...] | None = None  # ids that the row's grammar allows
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    @property
    def edits(self) -> LogitEdits:
        return LogitEdits(
            allowed_ids=None if self.allowed is None else int_array(self.allowed),
            bad_words=tuple(int_array(word) for word in self.bad_words),
            bias_ids=int_array([token for token, _ in self.bias]),
            bias_values=np.array([value for _, value in self.bias], np.float32),
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            repetition_penalty=self.repetition,
        )

    @property
    def has_edits(self) -> bool:
        return self.allowed is not None or bool(self.bias) or self.edits.need_history


@dataclass
class ListedMasks:
    """Grammar masks of the rows that have a grammar; counts how often they were waited for."""

    rows: Int32Array
    allowed: Sequence[Iterable[int]]
    vocab_size: int
    waits: int = field(default=0)

    def wait(self) -> Int32Array:
        self.waits += 1
        words = np.zeros((len(self.allowed), -(-self.vocab_size // 32)), np.uint32)
        for row, ids in enumerate(self.allowed):
            for token in ids:
                words[row, token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)


def int_array(values: Iterable[int]) -> Int32Array:
    return np.array(list(values), np.int32)


def make_columns(rows: Sequence[RowParams], vocab_size: int = 0) -> SamplingColumns:
    """`vocab_size` matters to rows with a grammar only."""
    masks = {i: row.in_grammar for i, row in enumerate(rows) if row.in_grammar is not None}
    return SamplingColumns(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64),
        output_position=np.array([row.position for row in rows], np.int32),
        num_logprobs=np.array([row.num_logprobs for row in rows], np.int32),
        forbidden_ids={i: np.array(row.forbidden, np.int32) for i, row in enumerate(rows) if row.forbidden},
        edits={i: row.edits for i, row in enumerate(rows) if row.has_edits},
        histories={
            i: TokenHistory(int_array(row.prompt), int_array(row.output))
            for i, row in enumerate(rows)
            if row.edits.need_history
        },
        grammar=ListedMasks(int_array(masks), list(masks.values()), vocab_size) if masks else None,
        logprob_ids={i: np.array(row.logprob_ids, np.int32) for i, row in enumerate(rows) if row.logprob_ids},
    )


def oracle_token(logits: NDArray[np.float32], params: RowParams) -> int:
    """The token of one row of logits [vocab]."""
    if not np.isfinite(logits.max()):
        return NOT_FINITE
    logits = edited_logits(logits, params)
    if not np.isfinite(logits.max()):
        return NOTHING_ALLOWED
    if params.temperature == 0:
        return min(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = weights_of_all(logits, params.temperature)
    kept = kept_tokens(logits, weights, params)
    total = sum(int(weights[i]) for i in kept)
    share = philox_bits(params.seed, params.position) * total >> 64
    for token in sorted(kept):
        share -= int(weights[token])
        if share < 0:
            return token
    raise AssertionError("the shares do not reach the total")


def edited_logits(logits: NDArray[np.float32], params: RowParams) -> NDArray[np.float32]:
    """Edit after edit, token after token, each a float32 operation."""
    return np.array([_edited(np.float32(x), token, params) for token, x in enumerate(logits)], np.float32)


def _edited(logit: np.float32, token: int, params: RowParams) -> np.float32:
    barred = (
        (params.in_grammar is not None and token not in params.in_grammar)
        or (params.allowed is not None and token not in params.allowed)
        or any((*params.output[len(params.output) - len(word) + 1 :], token) == word for word in params.bad_words)
        or token in params.forbidden
    )
    if barred or logit == -np.inf:
        return np.float32(-np.inf)
    for biased, value in params.bias:
        if biased == token:
            logit += np.float32(value)
    times = Counter(params.output)[token]
    if times or token in params.prompt:
        penalty, largest = np.float32(params.repetition), np.finfo(np.float32).max
        with np.errstate(over="ignore"):
            logit = min(max(logit / penalty if logit > 0 else logit * penalty, -largest), largest)
    if times:
        logit = logit - np.float32(params.frequency) * np.float32(times) - np.float32(params.presence)
    return logit


def weights_of_all(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    size = len(logits)
    return weigh_few(logits, np.full(size, logits.max()), rates(np.full(size, temperature, np.float32)))


def kept_tokens(logits: NDArray[np.float32], weights: NDArray[np.float32], params: RowParams) -> list[int]:
    """Ids that the filters leave, in order of probability."""
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    kept = [i for i in kept if weights[i] >= np.float32(params.min_p) * np.float32(LARGEST_WEIGHT)]
    if params.top_p < 1:
        kept.sort(key=lambda i: (-weights[i], i))
        wanted = max(1, math.ceil(float(np.float32(params.top_p)) * sum(int(weights[i]) for i in kept)))
        reached = 0
        for count, token in enumerate(kept, start=1):
            reached += int(weights[token])
            if reached >= wanted:
                return kept[:count]
    return kept


def philox_bits(seed: int, position: int) -> int:
    """Philox 4x32-10 with whole numbers, one word at a time."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = position, 0, 0, 0
    k0, k1 = seed & low, seed >> 32
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & low, (first >> 32) ^ c3 ^ k1, first & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0 | c1 << 32


def sample(logits: NDArray[np.float32], rows: Sequence[RowParams]) -> list[int]:
    tokens, _ = Sampler()(torch.from_numpy(logits), make_columns(rows, logits.shape[1]))
    assert tokens.dtype == np.int32
    return [int(token) for token in tokens]


def normal_logits(*shape: int, scale: float = 3.0, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
