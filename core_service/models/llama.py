"""Llama 2 and 3 (https://arxiv.org/abs/2307.09288, https://arxiv.org/abs/2407.21783), and what shares their layers.

Pre-norm decoder with rotary positions, grouped-query attention and a gated feed-forward layer. Llama 3's longer
context is a rope scaling; biases, where a checkpoint has them, follow from the configuration.
"""

from headrace.core_service.models.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """Nothing differs from the common decoder."""
