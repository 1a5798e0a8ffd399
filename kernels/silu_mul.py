"""The gate of Llama's feed-forward layer: y = silu(gate) * up (SwiGLU, https://arxiv.org/abs/2002.05202)."""

import torch

from headrace.kernels.power_of_two import LOG2_E, power_of_two


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * size], gate first → [rows, size]; in float32, rounded once.

    silu(x) = x * sigmoid(x); with t = exp(-|x|), sigmoid(x) is 1 / (1 + t), or t / (1 + t) for x < 0.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    t = power_of_two(gate.abs().neg_().mul_(LOG2_E))
    numerator = torch.where(gate < 0, gate * t, gate)
    return (numerator / (t + 1)).mul_(up).to(gate_up.dtype)
