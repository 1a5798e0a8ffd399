"""The parts that Llama-like decoders are made of. Each model file says how its own attention differs."""

import torch

from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.models.weight_reader import WeightReader
from headrace.kernels.layer_kernels import LayerKernels, StepKernels


class Attention:
    """Grouped-query attention with one projection for queries, keys and values together."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._num_q, self._num_kv, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._window = spec.window_of_layer(layer)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv = weights.linear(
            spec.hidden_size,
            [(f"{prefix}.q_proj", q_size), (f"{prefix}.k_proj", kv_size), (f"{prefix}.v_proj", kv_size)],
            bias=spec.qkv_bias,
        )
        self._output = weights.linear(q_size, [(f"{prefix}.o_proj", spec.hidden_size)], bias=spec.output_bias)

    def __call__(
        self, x: torch.Tensor, step: StepKernels, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """X [num_tokens, hidden] → [num_tokens, hidden]; writes the new keys and values into the layer's cache."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)  # queries, then keys, then values
        query_keys, values = heads[:, : self._num_q + self._num_kv], heads[:, self._num_q + self._num_kv :]
        queries = step.rotate_and_store(self.prepare(query_keys), values, key_cache, value_cache)
        return self._output(step.attend(queries, key_cache, value_cache, self._window).flatten(1))

    def prepare(self, query_key_heads: torch.Tensor) -> torch.Tensor:
        """What is done to queries and keys [num_tokens, num_heads + num_kv_heads, head_dim] before the rotation."""
        return query_key_heads


class Mlp:
    """Gated feed-forward layer with one projection for gate and up together."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, kernels: LayerKernels, layer: int) -> None:
        prefix, size = f"model.layers.{layer}.mlp", spec.intermediate_size
        self._kernels = kernels
        self._gate_up = weights.linear(
            spec.hidden_size, [(f"{prefix}.gate_proj", size), (f"{prefix}.up_proj", size)], bias=spec.mlp_bias
        )
        self._down = weights.linear(size, [(f"{prefix}.down_proj", spec.hidden_size)], bias=spec.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(self._kernels.silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward, each on the norm of the residual and added to it."""

    def __init__(
        self, spec: ModelSpec, weights: WeightReader, kernels: LayerKernels, layer: int, attention: Attention
    ) -> None:
        prefix = f"model.layers.{layer}"
        self._kernels = kernels
        self._eps, self._dtype = spec.rms_norm_eps, weights.dtype
        self._attention_norm = weights.vector(f"{prefix}.input_layernorm.weight", spec.hidden_size)
        self._attention = attention
        self._mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size)
        self._mlp = Mlp(spec, weights, kernels, layer)

    def __call__(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        step: StepKernels,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Adds `update`, what the layer before returned, to the residual; returns this layer's own update.

        Both are [num_tokens, hidden], the residual in float32 and changed in place.
        """
        x = self._kernels.add_norm(residual, update, self._attention_norm, self._eps, self._dtype)
        update = self._attention(x, step, key_cache, value_cache)
        return self._mlp(self._kernels.add_norm(residual, update, self._mlp_norm, self._eps, self._dtype))
