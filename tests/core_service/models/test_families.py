"""Every family gives transformers' own logits, in one chunk and in many."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core_service.models.registry import LoadedModel, load_model

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama_tied_with_biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_many_kv_heads_and_own_head_size": ("Llama", {"num_key_value_heads": 4, "head_dim": 12}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_SCALING}),
    "llama_yarn_mscale": (
        "Llama",
        {"rope_parameters": YARN_SCALING | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}},
    ),
    "llama_yarn_attention_factor": ("Llama", {"rope_parameters": YARN_SCALING | {"attention_factor": 1.3}}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "mistral_no_window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied_window": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}
CHUNKS = [(30,), (1,) * 30, (13, 1, 1, 8, 1, 6), (4, 4, 22)]


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def random_ids(count: int) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_any_chunking(
    name: str,
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    family, changes = CASES[name]
    expected = reference_logits(make_hf_model(family, **changes), random_ids(30))
    loaded = load_model(tmp_path, torch.float32)
    for chunks in CHUNKS:
        torch.testing.assert_close(logits_in_chunks(loaded, random_ids(30), chunks), expected, atol=1e-4, rtol=0)


def test_dynamic_scaling_equals_transformers_at_the_longest_context(
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    expected = reference_logits(
        make_hf_model("Llama", rope_parameters=scaling, max_position_embeddings=16), random_ids(30)
    )
    loaded = load_model(tmp_path, torch.float32, max_len=30)
    actual = logits_in_chunks(loaded, random_ids(30), (17, 1, 12))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_dynamic_scaling_leaves_the_original_context_alone(
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    expected = reference_logits(
        make_hf_model("Llama", rope_parameters=scaling, max_position_embeddings=32), random_ids(30)
    )
    loaded = load_model(tmp_path, torch.float32, max_len=32)
    torch.testing.assert_close(logits_in_chunks(loaded, random_ids(30), (30,)), expected, atol=1e-4, rtol=0)


def test_sharded_checkpoint_equals_single_file(
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    expected = reference_logits(make_hf_model("Llama", max_shard_size="20KB"), random_ids(30))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_model(tmp_path, torch.float32)
    torch.testing.assert_close(logits_in_chunks(loaded, random_ids(30), (30,)), expected, atol=1e-4, rtol=0)
