"""The parts that Llama-like decoders are made of. Each model file says how its own attention differs."""

from dataclasses import dataclass

import torch

from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.models.weight_reader import WeightReader
from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.kv_write import kv_write
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rope import rotate
from headrace.kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every layer of a step needs besides the hidden states; worked out once a step."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim] float32
    signed_sin: torch.Tensor  # [num_tokens, 1, head_dim] float32
    cache_rows: torch.Tensor  # [num_tokens * num_kv_heads] int64; see kernels.kv_write
    plans: dict[int | None, AttentionPlan]  # by window


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
        self, x: torch.Tensor, inputs: LayerInputs, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """X [num_tokens, hidden] → [num_tokens, hidden]; writes the new keys and values into the layer's cache."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)  # queries, then keys, then values
        rotated = rotate(self.prepare(heads[:, : self._num_q + self._num_kv]), inputs.cos, inputs.signed_sin)
        kv_write(
            rotated[:, self._num_q :], heads[:, self._num_q + self._num_kv :], key_cache, value_cache, inputs.cache_rows
        )
        attended = paged_attention(rotated[:, : self._num_q], key_cache, value_cache, inputs.plans[self._window])
        return self._output(attended.flatten(1))

    def prepare(self, query_key_heads: torch.Tensor) -> torch.Tensor:
        """What is done to queries and keys [num_tokens, num_heads + num_kv_heads, head_dim] before the rotation."""
        return query_key_heads


class Mlp:
    """Gated feed-forward layer with one projection for gate and up together."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, layer: int) -> None:
        prefix, size = f"model.layers.{layer}.mlp", spec.intermediate_size
        self._gate_up = weights.linear(
            spec.hidden_size, [(f"{prefix}.gate_proj", size), (f"{prefix}.up_proj", size)], bias=spec.mlp_bias
        )
        self._down = weights.linear(size, [(f"{prefix}.down_proj", spec.hidden_size)], bias=spec.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward, each on the norm of the residual and added to it."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, layer: int, attention: Attention) -> None:
        prefix = f"model.layers.{layer}"
        self._eps, self._dtype = spec.rms_norm_eps, weights.dtype
        self._attention_norm = weights.vector(f"{prefix}.input_layernorm.weight", spec.hidden_size)
        self._attention = attention
        self._mlp_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size)
        self._mlp = Mlp(spec, weights, layer)

    def __call__(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        inputs: LayerInputs,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Adds `update`, what the layer before returned, to the residual; returns this layer's own update.

        Both are [num_tokens, hidden], the residual in float32 and changed in place.
        """
        if update is None:
            x = rms_norm(residual, self._attention_norm, self._eps, self._dtype)
        else:
            x = add_rms_norm(residual, update, self._attention_norm, self._eps, self._dtype)
        x = add_rms_norm(
            residual, self._attention(x, inputs, key_cache, value_cache), self._mlp_norm, self._eps, self._dtype
        )
        return self._mlp(x)
