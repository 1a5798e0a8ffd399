"""Norm, rotation, gate and cache writes equal their formulas in float64."""

import pytest
import torch

from headrace.kernels.kv_write import cache_rows, kv_write
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rope import rotate
from headrace.kernels.silu_mul import silu_mul

# Odd sizes too: nothing may count on multiples of a vector.
SHAPES = [(1, 64), (5, 33), (130, 7)]
PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=1e-2)


def test_adding_before_the_norm_changes_the_residual_in_float32() -> None:
    residual, update = torch.full((2, 4), 256.0), torch.full((2, 4), 0.5, dtype=torch.bfloat16)
    add_rms_norm(residual, update, torch.ones(4), 1e-5, torch.bfloat16)
    assert (residual == 256.5).all()  # bfloat16 would have lost the half


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_rotation_turns_pairs_half_a_head_apart(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, 2, 8).to(dtype)
    angles = torch.randn(3, 1, 4)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.view_as_complex(torch.stack((x.double()[..., :4], x.double()[..., 4:]), -1))
    turned = pairs * torch.polar(torch.ones_like(angles.double()), angles.double())
    expected = torch.cat((turned.real, turned.imag), -1)
    actual = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_gate_comes_first(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = torch.randn(5, 7), torch.randn(5, 7)
    expected = gate.double() * gate.double().sigmoid() * up.double()
    actual = silu_mul(torch.cat((gate, up), -1).to(dtype))
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=2e-2)


def test_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    key_cache, value_cache = torch.zeros(6, 2, 4, 3), torch.zeros(6, 2, 4, 3)
    slots = torch.tensor([5 * 4 + 3, 1 * 4 + 0, 2 * 4 + 2])
    keys, values = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    kv_write(keys, values, key_cache, value_cache, cache_rows(slots, 2, 4))
    for token, (block, offset) in enumerate([(5, 3), (1, 0), (2, 2)]):
        assert torch.equal(key_cache[block, :, offset], keys[token])
        assert torch.equal(value_cache[block, :, offset], values[token])
    assert key_cache.count_nonzero() == keys.numel()
    assert value_cache.count_nonzero() == values.numel()
