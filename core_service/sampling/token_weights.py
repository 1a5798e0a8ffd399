"""Whole-number weights of tokens, proportional to exp(logit / temperature).

A weight is floor(2**40 * exp((logit - largest) / temperature)): the most likely token has 2**40, and a token that is
more than 2**40 times less likely has 0 and is never drawn. Probabilities are ratios of whole numbers, and that is the
point: sums of whole numbers are exact in every order. So totals, top-p masses and draws do not depend on how a sum is
split over threads, blocks, batches or devices, and a kernel on another device draws the same token from the same
logits.

The exponential is made of single IEEE float32 operations (subtract, multiply, add, integer shift), never fused: each
has exactly one right result, unlike a library's `exp`. A kernel must do the same operations in the same order with
multiply-add fusion switched off.

    t = (logit - largest) * log2(e) / temperature     at least -64
    k = t rounded to a whole number, f = t - k        f in [-0.5, 0.5]
    2**t = 2**k * polynomial(f)                       relative error below 2e-7, never decreasing in t
"""

import math

import numpy as np
import torch
from torch import Tensor

from headrace.core_service.batch import FloatArray

LARGEST_WEIGHT = 2**40
# Weights of one chunk of rows are summed in one int64: 2**22 entries of at most 2**40 stay below 2**63.
MAX_VOCAB_SIZE = 2**22

_LOWEST_POWER = -64.0  # 2**(40 - 64) is below 1, so whatever lies lower has weight 0 as well
# Adding 1.5 * 2**23 leaves no fraction bits: the sum is rounded to a whole number, which its low bits hold.
_ROUNDER = 1.5 * 2**23
_EXPONENT_SHIFT = 23
# Minimax fit of 2**f on [-0.5, 0.5] in relative error with the constant held at 1, so that the most likely token has
# exactly the largest weight. Highest power first; scaled by a power of two, which is exact.
_COEFFICIENTS = tuple(
    LARGEST_WEIGHT * float(np.float32(c)) for c in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.6931470, 1.0)
)
_SLOWEST_RATE, _FASTEST_RATE = 2.0**-100, 2.0**100


def rates(temperature: FloatArray) -> FloatArray:
    """log2(e) / temperature as float32 [n], for temperatures above 0; kept finite and above 0 for any of them."""
    exact = math.log2(math.e) / temperature.astype(np.float64)
    return np.clip(exact, _SLOWEST_RATE, _FASTEST_RATE).astype(np.float32)


def weigh_(logits: Tensor, largest: Tensor, rate: Tensor, scratch: Tensor, weights: Tensor) -> None:
    """Fill float32 `weights` with 2**40 * exp((logit - largest) / temperature), of which the whole part is the weight.

    `logits`, `scratch` and `weights` are distinct contiguous float32 tensors of one shape; `logits` is overwritten.
    `largest` (finite, not below any logit of its row) and `rate` (of `rates`) are float32 and broadcast to that shape.
    Logits may be -inf, not NaN.
    """
    powers = logits.sub_(largest).mul_(rate).clamp_min_(_LOWEST_POWER)
    rounded = torch.add(powers, _ROUNDER, out=scratch)
    torch.sub(rounded, _ROUNDER, out=weights)
    fractions = powers.sub_(weights)
    torch.mul(fractions, _COEFFICIENTS[0], out=weights)
    for coefficient in _COEFFICIENTS[1:-1]:
        weights.add_(coefficient).mul_(fractions)
    weights.add_(_COEFFICIENTS[-1])
    # The whole part of the power goes straight into the exponent bits; the shift drops what else the sum's bits hold.
    weights.view(torch.int32).add_(rounded.view(torch.int32).bitwise_left_shift_(_EXPONENT_SHIFT))


def weigh_few(logits: FloatArray, largest: FloatArray, rate: FloatArray) -> FloatArray:
    """The values of `weigh_` for some tokens: arrays [n] of one length in, float32 [n] out."""
    weights = torch.empty(len(logits))
    weigh_(torch.tensor(logits), torch.from_numpy(largest), torch.from_numpy(rate), torch.empty_like(weights), weights)
    found: FloatArray = weights.numpy()
    return found
