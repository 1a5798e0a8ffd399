"""Rotary position embedding (https://arxiv.org/abs/2104.09864), on halves of a head.

Dimensions i and i + d/2 rotate together by the angle position * frequency[i]:

    y[i]       = x[i] * cos - x[i + d/2] * sin
    y[i + d/2] = x[i + d/2] * cos + x[i] * sin
"""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates every head of every token in float32; the result has x's type.

    x [num_tokens, heads, head_dim]; cos and signed_sin [num_tokens, 1, head_dim] float32: cosines repeated over both
    halves, and sines, negative in the first half.
    """
    values = x.float()
    swapped = torch.roll(values, values.shape[-1] // 2, dims=-1)
    # Not addcmul: whether it rounds between the product and the sum is up to the build.
    return (values * cos).add_(swapped.mul_(signed_sin)).to(x.dtype)
