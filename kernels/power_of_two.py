"""2^x out of single rounded operations.

PyTorch's functions may work on vectors and, for what is left over at the end of a thread's share, on single numbers,
with different last bits (`sigmoid` and `silu` do): a number's result then depends on where it lies in a tensor. Here
every operation is exactly rounded.
"""

import torch

# Of 2^x on [-0.5, 0.5], highest power first; relative error 2e-7.
COEFFICIENTS = (
    1.54035304e-4,
    1.33335581e-3,
    9.61812911e-3,
    5.55041087e-2,
    2.40226507e-1,
    6.93147181e-1,
    1.0,
)
LOWEST_EXPONENT = -126.0
LOG2_E = 1.44269504


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^x for float32 x <= 0 of any shape: exactly 1 for 0, exactly 0 below -126; NaN stays NaN."""
    bounded = x.clamp(min=LOWEST_EXPONENT)
    whole = bounded.round()
    part = bounded.sub_(whole)
    y = torch.full_like(part, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        y.mul_(part).add_(coefficient)
    powers = whole.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return y.mul_(powers).masked_fill_(x < LOWEST_EXPONENT, 0.0)
