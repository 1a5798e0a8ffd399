"""The gate of Llama's feed-forward layer: y = silu(gate) * up (SwiGLU, https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * size], gate first → [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
