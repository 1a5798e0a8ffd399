"""Linear layers with weights packed once for oneDNN.

y = x Wᵀ + b, accumulated in float32 and rounded to x's type. Packed weights read about twice as fast as plain ones at
small batches in bfloat16.

A row's result does not depend on how many rows there are, bit by bit. For very few rows the libraries sum in another
order (oneDNN for 1, plain float32 `F.linear` for 1 to 3), so few rows are padded; from there on, every number of rows
up to 512 gave the same bits on nine shapes up to 8192 x 2048, with one and two threads.
"""

import torch
import torch.nn.functional as F

# The batch for which oneDNN lays the weights out; any other number of rows works, and 1 to 256 here took the same time.
PACKED_FOR_ROWS = 64
# Fewer rows than these are padded.
SMALLEST_PACKED_ROWS = 2
SMALLEST_PLAIN_ROWS = 4


def has_bfloat16_kernels() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; without, packed bfloat16 weights raise."""
    return _has_mkldnn("_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have packed linears for `dtype`. The operations are private: they may go away."""
    if not _has_mkldnn("_reorder_linear_weight", "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16_kernels())


def _has_mkldnn(*operations: str) -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and all(hasattr(torch.ops.mkldnn, name) for name in operations)


class PackedLinear:
    """One linear layer; owns its weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        # weight [out_features, in_features], bias [out_features]
        self.packed = can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if self.packed else weight
        self._bias = bias
        self._smallest_rows = SMALLEST_PACKED_ROWS if self.packed else SMALLEST_PLAIN_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, in_features] → [rows, out_features], of the weights' type."""
        rows = x.shape[0]
        if rows < self._smallest_rows:
            x = F.pad(x, (0, 0, 0, self._smallest_rows - rows))
        y: torch.Tensor
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y[:rows]
