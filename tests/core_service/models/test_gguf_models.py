"""A model written as GGUF gives the same logits as the same model in Hugging Face's format."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from headrace.core_service.models.registry import LoadedModel, load_model
from headrace.core_service.models.spec_reader import read_model_spec

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def interleave_rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to llama's query and key weights."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    metadata: dict[str, float | str | int],
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    adders: dict[type, Callable[[str, Any], None]] = {
        float: writer.add_float32,
        str: writer.add_string,
        int: writer.add_uint32,
    }
    for key, value in metadata.items():
        adders[type(value)](key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave_rotary_halves(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave_rotary_halves(tensor, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), tensor.contiguous().numpy())
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, float | str | int]]] = {
    "llama": ("Llama", "llama", {}, {}),
    "llama_tied_with_biases": ("Llama", "llama", {"tie_word_embeddings": True, "attention_bias": True}, {}),
    "llama_linear": (
        "Llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    ),
    "llama_yarn": (
        "Llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
        },
    ),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_gguf_equal_transformers(
    name: str,
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    family, architecture, changes, metadata = CASES[name]
    model = make_hf_model(family, **changes)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, model, metadata)
    token_ids = list(range(3, 33))
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    actual = logits_in_chunks(load_model(path, torch.float32), token_ids, (20, 1, 9))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_written_out_frequencies_equal_llama3_scaling(
    tmp_path: Path,
    make_hf_model: Callable[..., Any],
    logits_in_chunks: Callable[[LoadedModel, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = make_hf_model("Llama", rope_parameters=scaling)
    unscaled = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", model, {}, {"rope_freqs.weight": unscaled / model.model.rotary_emb.inv_freq})
    token_ids = list(range(3, 33))
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    actual = logits_in_chunks(load_model(path, torch.float32), token_ids, (30,))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_end_token_ids_are_listed_once_with_the_primary_first(
    tmp_path: Path, make_hf_model: Callable[..., Any]
) -> None:
    path = tmp_path / "tiny.gguf"
    ids: dict[str, float | str | int] = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eom_token_id": 5,
        "tokenizer.ggml.bos_token_id": 1,
    }
    write_gguf(path, "llama", make_hf_model("Llama"), ids)
    spec = read_model_spec(path)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (7, 5))
