"""The layer kernels in plain PyTorch: for machines without a C++ compiler."""

import torch

from headrace.kernels.kv_write import cache_rows, kv_write
from headrace.kernels.layer_kernels import StepFacts
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rope import rotate
from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.torch_attention import TorchAttention


class TorchKernels:
    """See `LayerKernels`."""

    name = "torch"

    def begin_step(self, facts: StepFacts) -> "TorchStep":
        """Groups the step's queries."""
        return TorchStep(facts)

    def add_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """residual, update [rows, size] → [rows, size] of `dtype`."""
        if update is None:
            return rms_norm(residual, weight, eps, dtype)
        return add_rms_norm(residual, update, weight, eps, dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [rows, 2 * size] → [rows, size]."""
        return silu_mul(gate_up)


class TorchStep:
    """See `StepKernels`."""

    def __init__(self, facts: StepFacts) -> None:
        self._facts = facts
        self._cache_rows = cache_rows(torch.from_numpy(facts.slot_mapping), facts.num_kv_heads, facts.block_size)
        self.attend = TorchAttention(facts)

    def rotate_and_store(
        self, query_keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """query_keys [num_tokens, num_heads + num_kv_heads, head_dim] → queries [num_tokens, num_heads, head_dim]."""
        rotated = rotate(query_keys, self._facts.cos, self._facts.signed_sin)
        num_heads = self._facts.num_heads
        kv_write(rotated[:, num_heads:], values, key_cache, value_cache, self._cache_rows)
        return rotated[:, :num_heads].contiguous()
