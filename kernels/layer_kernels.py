"""What a decoder layer computes besides its linear layers, as an interface with two implementations of one law.

The law: every result depends on its own inputs only, bit by bit, and not on the tokens and sequences that are computed
beside it, nor on the number of threads. `NativeKernels` (C++) and `TorchKernels` (plain PyTorch, needs no compiler)
both keep it; they agree up to rounding, not in every bit.

Attention is y = softmax(q kᵀ / sqrt(d)) v over keys and values in a paged cache. Query heads are grouped over KV heads
(https://arxiv.org/abs/2305.13245): query head h reads KV head h // (num_heads / num_kv_heads). Keys are walked in tiles
of KEY_TILE, anchored at position 0 of their sequence; tiles are summed within splits of SPLIT_KEYS keys, anchored
likewise, with a running maximum (https://arxiv.org/abs/1805.02867), and splits are merged in order:

    position   0        64       128                1024      1088
    keys       |- tile -|- tile -|- ... ---- tile --|- tile --|- ... |
    splits     |--------------- split --------------|---- split -----|

A tile is computed whole, keys that a query does not see with weight 0. So prompt chunks and decodes share one
arithmetic, and how a prompt is cut changes no bit. What no query of a step sees is never read.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

KEY_TILE = 64
SPLIT_KEYS = 16 * KEY_TILE


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step's tokens; the same for every layer. The arrays are those of `ScheduledBatch`."""

    query_start: NDArray[np.int32]  # [num_seqs + 1]
    context_lens: NDArray[np.int32]  # [num_seqs]
    block_tables: NDArray[np.int32]  # [num_seqs, most blocks]
    slot_mapping: NDArray[np.int64]  # [num_tokens] block * block_size + offset
    cos: torch.Tensor  # [num_tokens, 1, head_dim] float32, see kernels.rope
    signed_sin: torch.Tensor  # [num_tokens, 1, head_dim] float32
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class StepKernels(Protocol):
    """The parts that depend on where a step's tokens stand."""

    def rotate_and_store(
        self, query_keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """Rotates queries and keys, and stores keys and values in the cache.

        query_keys [num_tokens, num_heads + num_kv_heads, head_dim]; values [num_tokens, num_kv_heads, head_dim];
        key_cache and value_cache [num_blocks, num_kv_heads, block_size, head_dim], contiguous; all of one type, float32
        or bfloat16. Returns the rotated queries [num_tokens, num_heads, head_dim].
        """
        ...

    def attend(
        self, queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attends for every token of the step; its keys and values must be in the cache already.

        queries [num_tokens, num_heads, head_dim], contiguous; the caches as above; `window`: keys that a query sees,
        its own included (None: all). Returns [num_tokens, num_heads, head_dim].
        """
        ...


class LayerKernels(Protocol):
    """The kernels of a model."""

    @property
    def name(self) -> str:
        """What the bits depend on: the implementation and its instructions."""
        ...

    def begin_step(self, facts: StepFacts) -> StepKernels:
        """Works out what all layers of a step share."""
        ...

    def add_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds `update` (if any) to the residual in place; returns the norm of the sum in `dtype`.

        residual [rows, size] float32, contiguous; update [rows, size] of `dtype`, contiguous; weight [size] float32.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: gate_up [rows, 2 * size], gate first, contiguous → [rows, size]; rounded once."""
        ...
