"""Root mean square norm: y = x / sqrt(mean(x²) + eps) * weight (https://arxiv.org/abs/1910.07467).

The residual stream stays in float32: in bfloat16 it loses a bit or two at every layer, which shows in the ranks of
tokens.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Norm over the last dimension in float32, rounded once to `dtype`.

    x [..., size] of any type; weight [size] float32; returns [..., size].
    """
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * scale).mul_(weight).to(dtype)


def add_rms_norm(
    residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Adds `update` [rows, size] to the float32 `residual` [rows, size] in place; returns the norm of the sum."""
    residual.add_(update)
    return rms_norm(residual, weight, eps, dtype)
