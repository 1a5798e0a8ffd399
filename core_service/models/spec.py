"""The shape of a model, as plain facts. No torch here: the scheduler and the services read it too."""

import math
from dataclasses import dataclass, field
from enum import StrEnum


class RopeScalingKind(StrEnum):
    """How rotary positions are stretched beyond the length that the model was first trained for."""

    NONE = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What cos and sin are multiplied by: equation 22 of YaRN (https://arxiv.org/abs/2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; `headrace.core_service.models.rope` has the formulas."""

    theta: float = 10_000.0
    scaling: RopeScalingKind = RopeScalingKind.NONE
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0: max_position_embeddings of the model
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from the factor, as the paper says
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the corrected range outwards to whole dimensions
    frequency_divisors: tuple[float, ...] = ()  # [head_dim / 2] written out (GGUF's rope_freqs.weight); empty: none


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that follows from a model's configuration alone."""

    architecture: str  # llama, mistral, qwen2 or qwen3
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int  # longest context in tokens, scaling included
    rms_norm_eps: float
    rope: RopeSpec = field(default_factory=RopeSpec)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the projection after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head before the rotation
    sliding_window: int | None = None  # a token sees this many tokens, itself included
    first_sliding_layer: int = 0  # earlier layers see everything
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # the first is the primary one
    torch_dtype: str = "float32"  # of the stored weights, as torch names it

    def window_of_layer(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None means all."""
        return self.sliding_window if layer >= self.first_sliding_layer else None
