"""What config.json says becomes a ModelSpec, or one line that names file and reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.spec import ModelSpec, RopeScalingKind
from headrace.core_service.models.spec_reader import read_model_spec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def read(directory: Path, config: Any, generation: Any = None) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_spec(directory)


def test_silent_keys_take_the_family_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, spec.rope.theta) == (4, 16, 1e-6, 10_000.0)
    assert not spec.tie_word_embeddings
    assert spec.window_of_layer(0) is None


def test_old_and_new_spelling_of_rope_are_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA | {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    inside = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    assert read(tmp_path, LLAMA | {"rope_parameters": inside}) == old
    assert (old.rope.scaling, old.max_position_embeddings) == (RopeScalingKind.LINEAR, 256)


def test_generation_config_decides_about_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read(tmp_path, LLAMA | {"eos_token_id": 7}, {"eos_token_id": [9, 8]}).eos_token_ids == (9, 8)


def test_qwen_windows_start_at_their_layer(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    spec = read(tmp_path, qwen)
    assert [spec.window_of_layer(layer) for layer in range(4)] == [None, None, None, 8]
    types = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    assert read(tmp_path, qwen | {"layer_types": types}).first_sliding_layer == 1
    assert read(tmp_path, qwen | {"use_sliding_window": False}).sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"hidden_size": None}, "a value has the wrong type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "layer_types must be full attention first",
        ),
    ],
)
def test_unsupported_configuration_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(tmp_path, LLAMA | change)
    assert "\n" not in str(caught.value)


def test_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON"):
        read_model_spec(tmp_path)
    with pytest.raises(ModelLoadError, match="expected a JSON object"):
        read(tmp_path, [])
    without = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(ModelLoadError, match="vocab_size is missing"):
        read(tmp_path, without)
