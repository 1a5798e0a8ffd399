"""Executes a scheduled batch: forward pass, logits of the wanted rows, sampling, prompt log-probabilities."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from headrace.core_service.batch import (
    LogprobRows,
    PromptLogprobRange,
    SamplingColumns,
    ScheduledBatch,
    StepResult,
)
from headrace.core_service.kv_cache import KVCache, num_blocks_for
from headrace.core_service.models.registry import LoadedModel, load_model, resolve_dtype
from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.sampling.logprobs import prompt_logprob_rows
from headrace.core_service.sampling.sampler import Sampler
from headrace.kernels.layer_kernels import LayerKernels
from headrace.kernels.native_compiler import cpu_kind

# Prompt log-probabilities need the whole vocabulary's logits for every row: this many bytes of them at once.
PROMPT_LOGITS_BYTES = 64 * 2**20
# Bump when a change of kernels or layers changes any bit of the logits.
NUMERICS_VERSION = 2
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class NumericsFacts:
    """Everything that the bits of a logit depend on."""

    numerics_version: int
    weights_digest: str
    dtype: str
    attention_backend: str
    torch_version: str
    cpu_capability: str
    cpu_kind: str  # vendor and vector instructions: the libraries choose by them
    packed_linears: bool
    linears_in_blocks: int

    def id(self) -> str:
        """A short name: equal facts, equal id."""
        facts = "\n".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"cpu-{self.dtype}-{hashlib.sha256(facts.encode()).hexdigest()[:24]}"


class ModelRunner:
    """Owns model, KV cache and sampler. Not thread-safe: one engine thread calls it."""

    def __init__(self, loaded: LoadedModel, kv_cache: KVCache, sampler: Sampler) -> None:
        self.spec: ModelSpec = loaded.spec
        self.numerics = NumericsFacts(
            numerics_version=NUMERICS_VERSION,
            weights_digest=loaded.weights_digest,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            attention_backend=loaded.model.kernels.name,
            torch_version=str(torch.__version__),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            cpu_kind=cpu_kind(),
            packed_linears=loaded.model.packed,
            linears_in_blocks=loaded.linears_in_blocks,
        )
        self._model = loaded.model
        self._kv_cache = kv_cache
        self._sampler = sampler

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block 0 included."""
        return self._kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._kv_cache.block_size

    def numerics_id(self) -> str:
        """Two runners with equal ids give bitwise equal logits for the same tokens, in any batch."""
        return self.numerics.id()

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Runs one step; new keys and values are in the cache afterwards."""
        hidden = self._model.forward(batch, self._kv_cache)
        prompt_logprobs = tuple(self._prompt_logprobs(hidden, wanted) for wanted in batch.prompt_logprobs)
        if not len(batch.sample_index):
            return StepResult(np.empty(0, dtype=np.int32), None, prompt_logprobs)
        logits = self._model.logits(hidden[torch.from_numpy(batch.sample_index)])
        token_ids, logprobs = self._sampler(logits, batch.sampling)
        return StepResult(token_ids, logprobs, prompt_logprobs)

    def warm_up(self) -> None:
        """Runs a prompt chunk and a decode on the null block, so that the first request pays for no lazy set-up."""
        num_tokens = min(WARM_UP_TOKENS, self.block_size)
        self.execute(_warm_up_batch(num_tokens, num_tokens))
        self.execute(_warm_up_batch(1, num_tokens))

    def _prompt_logprobs(self, hidden: torch.Tensor, wanted: PromptLogprobRange) -> LogprobRows:
        """Log-probabilities of the targets, a bounded number of rows at a time."""
        parts = []
        for start, end in row_slices(len(wanted.target_ids), self.spec.vocab_size):
            logits = self._model.logits(hidden[wanted.first + start : wanted.first + end])
            rows = prompt_logprob_rows(logits, wanted.target_ids[start:end], wanted.num_logprobs, wanted.more_ids)
            parts.append(replace(rows, rows=rows.rows + np.int32(start)))
        return join_logprob_rows(parts)


def row_slices(num_rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Splits rows of float32 logits so that no part takes more than PROMPT_LOGITS_BYTES (but at least one row)."""
    step = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def join_logprob_rows(parts: list[LogprobRows]) -> LogprobRows:
    """Puts the entries of parts side by side; their `rows` stay as they are."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return LogprobRows(
        rows=np.concatenate([part.rows for part in parts]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


def build_runner(
    model_path: Path,
    *,
    kv_cache_memory: int,
    dtype: str = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    progress: bool = False,
    kernels: LayerKernels | None = None,
) -> ModelRunner:
    """Loads a model and makes room for its KV cache. StartupError (ModelLoadError) with one line when that fails.

    dtype is auto, float32 or bfloat16; kv_cache_memory is in bytes; max_model_len None is the model's own limit;
    kernels None are the best that this machine can have.
    """
    loaded = load_model(model_path, resolve_dtype(dtype), progress, max_model_len, kernels)
    num_blocks = num_blocks_for(loaded.spec, block_size, loaded.model.dtype, kv_cache_memory)
    kv_cache = KVCache(loaded.spec, num_blocks, block_size, loaded.model.dtype)
    return ModelRunner(loaded, kv_cache, Sampler())


def _warm_up_batch(num_queries: int, context_len: int) -> ScheduledBatch:
    """One sequence on the null block, greedy."""
    positions = np.arange(context_len - num_queries, context_len)
    return ScheduledBatch(
        step=0,
        query_start=np.array([0, num_queries], dtype=np.int32),
        token_ids=np.zeros(num_queries, dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=positions.astype(np.int64),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        context_lens=np.array([context_len], dtype=np.int32),
        sample_index=np.array([num_queries - 1], dtype=np.int64),
        sampling=SamplingColumns(
            temperature=np.zeros(1, dtype=np.float32),
            top_k=np.zeros(1, dtype=np.int32),
            top_p=np.ones(1, dtype=np.float32),
            min_p=np.zeros(1, dtype=np.float32),
            seed=np.zeros(1, dtype=np.uint64),
            output_position=np.zeros(1, dtype=np.int32),
            num_logprobs=np.full(1, -1, dtype=np.int32),
        ),
    )
