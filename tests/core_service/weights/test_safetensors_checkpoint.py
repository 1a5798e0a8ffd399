"""Hugging Face directories: every kind of damage is one clear line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.common.errors import ModelLoadError
from headrace.core_service.weights.load import open_checkpoint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a configuration and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_converted(directory: Path, dtype: torch.dtype) -> None:
    expected = torch.randn(10, 8).to(dtype)
    save_file({"model.embed_tokens.weight": expected}, directory / "model.safetensors")
    actual = open_checkpoint(directory).tensor("model.embed_tokens.weight", (10, 8), torch.float32)
    assert torch.equal(actual, expected.float())


def test_shards_are_one_checkpoint(directory: Path) -> None:
    save_file({"a": torch.zeros(2)}, directory / "one.safetensors")
    save_file({"b": torch.ones(2)}, directory / "two.safetensors")
    write_index(directory, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = open_checkpoint(directory)
    assert sorted(checkpoint.names()) == ["a", "b"]
    assert checkpoint.tensor("b", (2,), torch.float32).tolist() == [1, 1]


def test_tied_heads_and_old_buffers_may_stay_unread(directory: Path) -> None:
    tensors = {"lm_head.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors, directory / "model.safetensors")
    open_checkpoint(directory).check_all_read()


def test_unread_weights_are_refused(directory: Path) -> None:
    save_file({f"adapter.{i}": torch.zeros(1) for i in range(5)}, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not have: adapter\.0, adapter\.1, adapter\.2 and 2 more"):
        open_checkpoint(directory).check_all_read()


def test_missing_files_are_named(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(directory)
    write_index(directory, {"a": "gone.safetensors"})
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors: no such file"):
        open_checkpoint(directory)


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_a_file_cut_off_anywhere_is_refused_in_one_line(directory: Path, length: int) -> None:
    path = directory / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: damaged or cut off") as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)


def test_an_index_names_only_files_beside_it(directory: Path) -> None:
    write_index(directory, {"a": "../elsewhere.safetensors"})
    with pytest.raises(ModelLoadError, match="not a file of this directory"):
        open_checkpoint(directory)
    write_index(directory, {})
    with pytest.raises(ModelLoadError, match="weight_map is missing"):
        open_checkpoint(directory)


def test_unsupported_types_are_named(directory: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match="tensor a has type I8, supported are F32, F16, BF16"):
        open_checkpoint(directory)
