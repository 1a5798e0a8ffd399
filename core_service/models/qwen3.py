"""Qwen3, dense (https://arxiv.org/abs/2505.09388).

Qwen2 without the bias; each query and key head is normed before the rotation, and the head size is written in the
configuration.
"""

import torch

from headrace.core_service.models.causal_lm import CausalLM
from headrace.core_service.models.layers import Attention
from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.models.weight_reader import WeightReader
from headrace.kernels.rms_norm import rms_norm


class Qwen3Attention(Attention):
    """Attention with an RMS norm over every query and key head."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, layer: int) -> None:
        super().__init__(spec, weights, layer)
        prefix = f"model.layers.{layer}.self_attn"
        query_norm = weights.vector(f"{prefix}.q_norm.weight", spec.head_dim)
        key_norm = weights.vector(f"{prefix}.k_norm.weight", spec.head_dim)
        # [num_heads + num_kv_heads, head_dim]: one norm over all heads together.
        self._head_norms = torch.cat((query_norm.expand(spec.num_heads, -1), key_norm.expand(spec.num_kv_heads, -1)))
        self._eps = spec.rms_norm_eps

    def prepare(self, query_key_heads: torch.Tensor) -> torch.Tensor:
        """Norms queries and keys [num_tokens, num_heads + num_kv_heads, head_dim] over each head."""
        return rms_norm(query_key_heads, self._head_norms, self._eps, query_key_heads.dtype)


class Qwen3ForCausalLM(CausalLM):
    """The common decoder with normed query and key heads."""

    attention = Qwen3Attention
