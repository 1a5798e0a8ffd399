"""A GGUF file's metadata → ModelSpec. No torch here.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Mistral is stored as architecture `llama`, without its
sliding window (current Mistral models have none).
"""

from typing import Any

import gguf
import numpy as np

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.spec import ModelSpec, RopeScalingKind, RopeSpec, yarn_attention_factor
from headrace.core_service.weights.gguf_file import GgufFile

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SCALING_KINDS = {"none": RopeScalingKind.NONE, "linear": RopeScalingKind.LINEAR, "yarn": RopeScalingKind.YARN}
_FLOAT_NAMES = {"F16": "float16", "BF16": "bfloat16"}
ROPE_FREQUENCIES = "rope_freqs.weight"


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """Reads the shape of the model; ModelLoadError when the architecture is not supported or a key is missing."""
    architecture = _required(file, "general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {architecture!r} is not supported in a GGUF file, only "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise ModelLoadError(f"{file.path}: mixture-of-experts models are not supported")

    def value(key: str, default: Any = None) -> Any:
        return (
            _required(file, f"{architecture}.{key}")
            if default is None
            else file.metadata.get(f"{architecture}.{key}", default)
        )

    num_heads = int(value("attention.head_count"))
    hidden_size = int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"{file.path}: {architecture}.{key} {value(key)} differs from the head size {head_dim}"
            )
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else int(value("vocab_size"))
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=int(value("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(value("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        intermediate_size=int(value("feed_forward_length")),
        vocab_size=vocab_size,
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, architecture, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_token_ids(file),
        torch_dtype=_stored_dtype(file),
    )


def _required(file: GgufFile, key: str) -> Any:
    if key not in file.metadata:
        raise ModelLoadError(f"{file.path}: metadata key {key} is missing")
    return file.metadata[key]


def _rope(file: GgufFile, architecture: str, head_dim: int) -> RopeSpec:
    def value(key: str, default: Any) -> Any:
        return file.metadata.get(f"{architecture}.rope.{key}", default)

    name = value("scaling.type", "none")
    if name not in _SCALING_KINDS:
        raise ModelLoadError(f"{file.path}: rope scaling {name!r} is not supported, only {', '.join(_SCALING_KINDS)}")
    factor = float(value("scaling.factor", 1.0))
    kind = _SCALING_KINDS[name] if factor not in (0.0, 1.0) else RopeScalingKind.NONE
    # Old files have only the linear factor, under another key.
    if "scaling.type" not in file.metadata and value("scale_linear", 1.0) != 1.0:
        kind, factor = RopeScalingKind.LINEAR, float(value("scale_linear", 1.0))
    return RopeSpec(
        theta=float(value("freq_base", 10_000.0)),
        scaling=kind,
        factor=factor,
        original_max_position_embeddings=int(value("scaling.original_context_length", 0)),
        beta_fast=float(value("scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(value("scaling.yarn_beta_slow", 1.0)),
        attention_factor=_attention_factor(value("scaling.attn_factor", None), factor),
        frequency_divisors=_frequency_divisors(file, head_dim),
    )


def _end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of sequence first, then end of turn and of message, each once."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def _attention_factor(written: float | None, factor: float) -> float | None:
    """GGUF's `attn_factor` multiplies the factor that the paper gives, Hugging Face's replaces it."""
    return None if written is None else written * yarn_attention_factor(factor)


def _frequency_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    """`rope_freqs.weight` holds llama3's scaling written out, one divisor for each pair of a head's dimensions."""
    tensor = file.tensors.get(ROPE_FREQUENCIES)
    if tensor is None:
        return ()
    if tensor.shape != (head_dim // 2,) or tensor.quantization != gguf.GGMLQuantizationType.F32:
        raise ModelLoadError(
            f"{file.path}: tensor {ROPE_FREQUENCIES} is {tensor.quantization.name} {list(tensor.shape)}, "
            f"expected F32 [{head_dim // 2}]"
        )
    return tuple(float(x) for x in file.tensor_bytes(tensor).view(np.float32))


def _stored_dtype(file: GgufFile) -> str:
    embedding = file.tensors.get("token_embd.weight")
    return _FLOAT_NAMES.get(embedding.quantization.name, "float32") if embedding else "float32"
