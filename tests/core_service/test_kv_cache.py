"""The cache has the shape that was asked for, and its size is checked before it is taken."""

import pytest
import torch

from headrace.common.errors import StartupError
from headrace.core_service import kv_cache
from headrace.core_service.kv_cache import KVCache, free_memory_bytes, kv_bytes_per_block, num_blocks_for
from headrace.core_service.models.spec import ModelSpec

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=100,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_its_bytes_per_block(dtype: torch.dtype) -> None:
    cache = KVCache(SPEC, 5, 4, dtype)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert {tuple(tensor.shape) for tensor in tensors} == {(5, 2, 4, 8)}
    assert sum(tensor.nbytes for tensor in tensors) == 5 * kv_bytes_per_block(SPEC, 4, dtype)


def test_blocks_fill_the_memory_and_no_more() -> None:
    per_block = kv_bytes_per_block(SPEC, 4, torch.float32)
    assert num_blocks_for(SPEC, 4, torch.float32, 10 * per_block) == 10
    assert num_blocks_for(SPEC, 4, torch.float32, 11 * per_block - 1) == 10


def test_too_little_memory_is_refused_with_the_true_numbers() -> None:
    per_block = kv_bytes_per_block(SPEC, 4, torch.float32)
    with pytest.raises(StartupError, match=rf"\({2 * per_block - 1} bytes\).* \({2 * per_block} bytes\)"):
        num_blocks_for(SPEC, 4, torch.float32, 2 * per_block - 1)


def test_more_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda: 3 << 29)
    with pytest.raises(StartupError, match=r"is 3 GiB, but only 1\.5 GiB of memory is free"):
        num_blocks_for(SPEC, 4, torch.float32, 3 << 30)


def test_free_memory_is_known() -> None:
    assert free_memory_bytes() > 0


def test_a_cache_without_a_usable_block_is_a_bug() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        KVCache(SPEC, 1, 4, torch.float32)
