"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671).

Llama's layers with a bias on queries, keys and values (`ModelSpec.qkv_bias`), a tied head in the small sizes, and an
optional sliding window in the later layers.
"""

from headrace.core_service.models.causal_lm import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The common decoder; bias, tie and window are part of the specification."""
