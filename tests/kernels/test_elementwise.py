"""Norm, rotation, gate and cache writes equal their formulas in float64, and no row depends on another."""

import math
from dataclasses import replace

import pytest
import torch
from attention_steps import empty_facts

from headrace.kernels.layer_kernels import LayerKernels
from headrace.kernels.power_of_two import power_of_two

# Odd sizes too: nothing may count on multiples of a vector.
SHAPES = [(1, 64), (5, 33), (130, 7), (3, 1000)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
# Enough numbers for several threads, cut at odd places by three of them.
MANY_ROWS, ODD_SIZE = 90, 1003


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_its_formula(kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = kernels.add_norm(x, None, weight, 1e-5, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=1e-2)


def test_adding_before_the_norm_changes_the_residual_in_float32(kernels: LayerKernels) -> None:
    residual, update = torch.full((2, 4), 256.0), torch.full((2, 4), 0.5, dtype=torch.bfloat16)
    kernels.add_norm(residual, update, torch.ones(4), 1e-5, torch.bfloat16)
    assert (residual == 256.5).all()  # bfloat16 would have lost the half


@pytest.mark.parametrize("head_dim", [8, 80, 128])
def test_rotation_turns_pairs_half_a_head_apart_and_keys_and_values_land_in_their_slots(
    kernels: LayerKernels, dtype: torch.dtype, head_dim: int
) -> None:
    half = head_dim // 2
    heads = torch.randn(3, 7, head_dim).to(dtype)  # three query heads, two key heads, two value heads
    angles = torch.randn(3, 1, half)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.tensor([5 * 4 + 3, 1 * 4 + 0, 2 * 4 + 2])
    facts = replace(
        empty_facts(3, (3, 2), head_dim, block_size=4),
        slot_mapping=slots.numpy(),
        cos=torch.cat((cos, cos), -1),
        signed_sin=torch.cat((-sin, sin), -1),
    )
    key_cache, value_cache = (torch.zeros(6, 2, 4, head_dim, dtype=dtype) for _ in range(2))
    queries = kernels.begin_step(facts).rotate_and_store(heads[:, :5], heads[:, 5:], key_cache, value_cache)

    wide = heads[:, :5].double()
    pairs = torch.view_as_complex(torch.stack((wide[..., :half], wide[..., half:]), -1))
    turned = pairs * torch.polar(torch.ones_like(angles.double()), angles.double())
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(queries.double(), expected[:, :3], atol=TOLERANCE[dtype], rtol=0)
    for token, (block, offset) in enumerate([(5, 3), (1, 0), (2, 2)]):
        torch.testing.assert_close(
            key_cache[block, :, offset].double(), expected[token, 3:], atol=TOLERANCE[dtype], rtol=0
        )
        assert torch.equal(value_cache[block, :, offset], heads[token, 5:])
    assert key_cache.count_nonzero() == value_cache.count_nonzero() == 3 * 2 * head_dim


@pytest.mark.parametrize("shape", SHAPES)
def test_gate_comes_first(kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = (torch.randn(shape).mul_(4).to(dtype) for _ in range(2))
    expected = gate.double() * gate.double().sigmoid() * up.double()
    actual = kernels.silu_mul(torch.cat((gate, up), -1))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype] / 10, rtol=1e-2)


def test_the_gate_of_extremes(kernels: LayerKernels) -> None:
    gate = torch.tensor([[-math.inf, -1e4, -90.0, 0.0, 90.0, 1e4, math.nan]])
    actual = kernels.silu_mul(torch.cat((gate, torch.ones_like(gate)), -1))[0]
    torch.testing.assert_close(actual[1:6], torch.tensor([0.0, 0.0, 0.0, 90.0, 1e4]), atol=1e-30, rtol=1e-6)
    assert actual[6].isnan()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_no_row_depends_on_the_others_or_on_the_threads(
    kernels: LayerKernels, dtype: torch.dtype, threads: int
) -> None:
    x, update = torch.randn(MANY_ROWS, ODD_SIZE), torch.randn(MANY_ROWS, ODD_SIZE).to(dtype)
    weight, gate_up = torch.randn(ODD_SIZE), torch.randn(MANY_ROWS, 2 * ODD_SIZE).to(dtype)
    normed = [kernels.add_norm(x[i : i + 1].clone(), update[i : i + 1], weight, 1e-5, dtype) for i in range(MANY_ROWS)]
    gated = [kernels.silu_mul(gate_up[i : i + 1]) for i in range(MANY_ROWS)]
    torch.set_num_threads(threads)
    for rows in (1, 2, 33, 89, MANY_ROWS):
        together = kernels.add_norm(x[:rows].clone(), update[:rows], weight, 1e-5, dtype)
        assert torch.equal(together, torch.cat(normed[:rows]))
        assert torch.equal(kernels.silu_mul(gate_up[:rows]), torch.cat(gated[:rows]))


def test_powers_of_two() -> None:
    x = torch.cat((-torch.rand(10_000) * 126, torch.arange(-126.0, 1.0)))
    torch.testing.assert_close(power_of_two(x).double(), x.double().exp2(), atol=0, rtol=3e-7)
    ends = power_of_two(torch.tensor([0.0, -126.5, -math.inf, math.nan]))
    assert ends[:3].tolist() == [1.0, 0.0, 0.0]
    assert ends[3].isnan()
