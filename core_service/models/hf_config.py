"""A Hugging Face directory's config.json and generation_config.json → ModelSpec. No torch here."""

import json
from pathlib import Path
from typing import Any

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.spec import ModelSpec, RopeScalingKind, RopeSpec

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Values that transformers' configuration classes fill in where config.json is silent; other keys must be there.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}


def spec_from_hf_directory(directory: Path) -> ModelSpec:
    """Reads the shape of the model; ModelLoadError for an unsupported architecture, quantization or rope scaling."""
    path = directory / "config.json"
    config = read_json_object(path)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelLoadError(
            f"{path}: model_type {model_type!r} is not supported, only {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ModelLoadError(f"{path}: quantization {method!r} is not supported in a Hugging Face directory")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{path}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    merged = _DEFAULTS[model_type] | config
    try:
        return _spec(path, model_type, merged, _end_token_ids(directory, config))
    except KeyError as missing:
        raise ModelLoadError(f"{path}: {missing.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: a value has the wrong type ({error})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelLoadError when there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return value


def _spec(path: Path, model_type: str, config: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    rope, context_length = _rope(path, config)
    sliding_window, first_sliding_layer = _window(path, model_type, config)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=model_type,
        hidden_size=hidden_size,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=context_length,
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        sliding_window=sliding_window,
        first_sliding_layer=first_sliding_layer,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _window(path: Path, model_type: str, config: dict[str, Any]) -> tuple[int | None, int]:
    """The window and the first layer that has it. Llama has none; Qwen turns it on by a flag, for its later layers."""
    window = config.get("sliding_window")
    if model_type == "llama" or window is None:
        return None, 0
    if model_type == "mistral":
        return int(window), 0
    if not config.get("use_sliding_window", False):
        return None, 0
    num_layers = int(config["num_hidden_layers"])
    layer_types = config.get("layer_types")
    if layer_types is None:
        return int(window), int(config["max_window_layers"])
    sliding = [layer == "sliding_attention" for layer in layer_types]
    first = sliding.index(True) if True in sliding else num_layers
    if len(sliding) != num_layers or not all(sliding[first:]):
        raise ModelLoadError(
            f"{path}: layer_types must be full attention first, then sliding attention to the last layer"
        )
    return int(window), first


def _rope(path: Path, config: dict[str, Any]) -> tuple[RopeSpec, int]:
    """Rotary parameters, and the longest context they serve.

    Both spellings are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` with all of them inside.
    """
    parameters: dict[str, Any] = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if name not in list(RopeScalingKind):
        kinds = ", ".join(RopeScalingKind)
        raise ModelLoadError(f"{path}: rope scaling {name!r} is not supported, only {kinds}")
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError(f"{path}: partial_rotary_factor is not supported")
    kind = RopeScalingKind(name)
    written = int(config["max_position_embeddings"])
    original = int(
        parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or written
    )
    factor = 1.0 if kind is RopeScalingKind.NONE else float(parameters.get("factor") or written / original)
    attention_factor = parameters.get("attention_factor")
    rope = RopeSpec(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        scaling=kind,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=float(parameters["low_freq_factor"]) if kind is RopeScalingKind.LLAMA3 else 1.0,
        high_freq_factor=float(parameters["high_freq_factor"]) if kind is RopeScalingKind.LLAMA3 else 4.0,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(parameters.get("mscale") or 0.0),
        mscale_all_dim=float(parameters.get("mscale_all_dim") or 0.0),
        truncate=bool(parameters.get("truncate", True)),
    )
    # llama3 and the default are trained to the length that is written; the others stretch the original one.
    stretches = kind in (RopeScalingKind.LINEAR, RopeScalingKind.DYNAMIC, RopeScalingKind.YARN)
    return rope, max(written, int(original * factor)) if stretches else written


def _end_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Those of generation_config.json, which is what a model is to be run with; else those of config.json."""
    path = directory / "generation_config.json"
    generation = read_json_object(path) if path.exists() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
