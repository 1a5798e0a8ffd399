"""Linear layers with weights packed once for oneDNN.

y = x Wᵀ + b, accumulated in float32 and rounded to x's type. Packed weights read about twice as fast as plain ones at
small batches in bfloat16.

A row's result must not depend on how many rows there are, bit by bit. For very few rows the libraries sum in another
order (oneDNN for 1, plain float32 `F.linear` for 1 to 3), so few rows are padded; from there on, every number of rows
up to 512 gave the same bits on nine shapes up to 8192 x 2048, with one and two threads. No library promises that, so
`linear_check` looks at each shape of a model when it is loaded; a layer that fails is computed in blocks of BLOCK_ROWS
rows, padded to whole ones: then there is only one number of rows.
"""

import torch
import torch.nn.functional as F

# The batch for which oneDNN lays the weights out; any other number of rows works, and 1 to 256 here took the same time.
PACKED_FOR_ROWS = 64
# Fewer rows than these are padded.
SMALLEST_PACKED_ROWS = 2
SMALLEST_PLAIN_ROWS = 4
BLOCK_ROWS = 64


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
        self.out_features, self.in_features = weight.shape
        self.has_bias = bias is not None
        self.dtype = weight.dtype
        self.in_blocks = False  # whether rows are computed in blocks of BLOCK_ROWS
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if self.packed else weight
        self._bias = bias
        self._smallest_rows = SMALLEST_PACKED_ROWS if self.packed else SMALLEST_PLAIN_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, in_features] → [rows, out_features], of the weights' type."""
        rows = x.shape[0]
        padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS if self.in_blocks else max(rows, self._smallest_rows)
        if rows < padded:
            x = F.pad(x, (0, 0, 0, padded - rows))
        if self.in_blocks:
            return torch.cat([self._multiply(block) for block in torch.split(x, BLOCK_ROWS)])[:rows]
        return self._multiply(x)[:rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y
