"""Mistral 7B and its successors (https://arxiv.org/abs/2310.06825).

Llama's layers; in the first release a token sees only the last `sliding_window` tokens, which `ModelSpec` carries to
every layer.
"""

from headrace.core_service.models.causal_lm import CausalLM


class MistralForCausalLM(CausalLM):
    """The common decoder; the window is part of the specification."""
