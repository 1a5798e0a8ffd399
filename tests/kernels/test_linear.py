"""Packed linears equal plain ones, and a row does not depend on its neighbours."""

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import linear
from headrace.kernels.linear import PackedLinear, can_pack

DTYPES = [torch.float32, *([torch.bfloat16] if linear.has_bfloat16_kernels() else [])]
SHAPES = [(96, 64), (33, 17), (1, 8)]
# Output and input sizes of the demo model's layers: queries, keys and values; attention's output; gate and up; down.
DEMO_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
DEMO_HEAD = (49152, 576)
MOST_ROWS = 300


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without torch's private operations."""
    torch.set_num_threads(1)
    if not request.param:
        monkeypatch.setattr(linear, "can_pack", lambda _: False)
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_result_is_the_product(packing: bool, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    layer = PackedLinear(weight, bias)
    assert layer.packed == (packing and can_pack(dtype))
    x = torch.randn(5, shape[1]).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
def test_rows_are_bitwise_the_same_in_any_batch(packing: bool, dtype: torch.dtype, rows: int) -> None:
    del packing
    layer = PackedLinear(torch.randn(192, 64).to(dtype))
    x = torch.randn(64, 64).to(dtype)
    assert torch.equal(layer(x[:rows]), layer(x)[:rows])


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", DEMO_SHAPES)
def test_every_number_of_rows_gives_a_row_the_same_bits(
    shape: tuple[int, int], dtype: torch.dtype, threads: int, in_blocks: bool
) -> None:
    layer, x, expected = layer_and_rows(shape, dtype, in_blocks=in_blocks)
    torch.set_num_threads(threads)
    for rows in range(1, MOST_ROWS + 1):
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_gives_a_row_the_same_bits_in_the_head(dtype: torch.dtype) -> None:
    layer, x, expected = layer_and_rows(DEMO_HEAD, dtype)
    for rows in range(1, MOST_ROWS + 1):
        torch.set_num_threads(1 + rows // 2 % 2)  # each number of rows with one of the two, for the time it takes
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows


def layer_and_rows(
    shape: tuple[int, int], dtype: torch.dtype, *, in_blocks: bool = False
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """A layer, rows for it, and what one thread makes of them."""
    torch.set_num_threads(1)
    layer = PackedLinear((torch.randn(shape) * 0.02).to(dtype))
    layer.in_blocks = in_blocks
    x = torch.randn(MOST_ROWS, shape[1]).to(dtype)
    return layer, x, layer(x)
