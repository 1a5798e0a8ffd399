"""GGUF files: every supported type is dequantized right, and every kind of damage is one clear line."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from numpy.typing import NDArray

from headrace.common.errors import ModelLoadError
from headrace.core_service.weights.gguf_checkpoint import GgufCheckpoint, hugging_face_name, join_rotary_halves
from headrace.core_service.weights.load import open_checkpoint

Bytes = NDArray[np.uint8]


def write(
    path: Path, encoded: NDArray[np.generic], quantization: Quantization | None, architecture: str = "llama"
) -> Path:
    """A GGUF file with one tensor, token_embd.weight, and the metadata of a tiny model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(32)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {i}" for i in range(5000)])
    writer.add_tensor("token_embd.weight", encoded, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(rows: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)


def embedding(path: Path, rows: int = 3) -> torch.Tensor:
    return GgufCheckpoint(path).tensor("model.embed_tokens.weight", (rows, 256), torch.float32)


def q4_k_block(scales: list[int], mins: list[int], quants: Bytes, d: float, dmin: float) -> Bytes:
    """Encodes 256 values d * scale * quant - dmin * min: 8 groups of 32, 6-bit scales and mins, 4-bit quants."""
    packed = np.zeros(12, np.uint8)
    for i in range(4):
        packed[i] = scales[i] | (scales[i + 4] >> 4) << 6
        packed[i + 4] = mins[i] | (mins[i + 4] >> 4) << 6
        packed[i + 8] = scales[i + 4] & 15 | (mins[i + 4] & 15) << 4
    pairs = quants.reshape(4, 2, 32)
    nibbles = (pairs[:, 0] | pairs[:, 1] << 4).reshape(-1)
    return np.concatenate([np.array([d, dmin], np.float16).view(np.uint8), packed, nibbles])


def q6_k_block(scales: NDArray[np.int8], quants: Bytes, d: float) -> Bytes:
    """Encodes 256 values d * scale * (quant - 32): 16 groups of 16, 6-bit quants as low 4 and high 2 bits."""
    quarters = quants.reshape(2, 4, 32)
    low = np.stack(
        [quarters[:, 0] & 15 | (quarters[:, 2] & 15) << 4, quarters[:, 1] & 15 | (quarters[:, 3] & 15) << 4], 1
    )
    high = np.bitwise_or.reduce([(quarters[:, i] >> 4) << 2 * i for i in range(4)])
    return np.concatenate(
        [
            low.reshape(-1),
            high.reshape(-1).astype(np.uint8),
            scales.view(np.uint8),
            np.array([d], np.float16).view(np.uint8),
        ]
    )


@pytest.mark.parametrize(("name", "error"), [("F32", 0.0), ("F16", 2e-3), ("BF16", 2e-2)])
def test_float_types_keep_their_values(tmp_path: Path, name: str, error: float) -> None:
    expected = values()
    encoded = gguf.quants.quantize(expected, Quantization[name])
    actual = embedding(write(tmp_path / "m.gguf", encoded, Quantization[name]))
    np.testing.assert_allclose(actual.numpy(), expected, atol=error, rtol=0)


@pytest.mark.parametrize(("name", "error"), [("Q8_0", 0.03), ("Q4_0", 0.4), ("Q4_1", 0.3)])
def test_quantized_types_are_near_their_values(tmp_path: Path, name: str, error: float) -> None:
    expected = values()
    encoded = gguf.quants.quantize(expected, Quantization[name])
    actual = embedding(write(tmp_path / "m.gguf", encoded, Quantization[name]))
    np.testing.assert_allclose(actual.numpy(), expected, atol=error, rtol=0)


def test_q4_k_blocks_follow_their_formula(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    scales, mins = random.integers(0, 64, (2, 8)).tolist()
    quants = random.integers(0, 16, 256).astype(np.uint8)
    encoded = q4_k_block(scales, mins, quants, 0.5, 0.25)[None]
    expected = 0.5 * np.repeat(scales, 32) * quants - 0.25 * np.repeat(mins, 32)
    actual = embedding(write(tmp_path / "m.gguf", encoded, Quantization.Q4_K), rows=1)
    assert torch.equal(actual[0], torch.from_numpy(expected).bfloat16().float())


def test_q6_k_blocks_follow_their_formula(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    scales = random.integers(-128, 128, 16).astype(np.int8)
    quants = random.integers(0, 64, 256).astype(np.uint8)
    encoded = q6_k_block(scales, quants, 0.125)[None]
    expected = 0.125 * np.repeat(scales.astype(np.float64), 16) * (quants.astype(np.float64) - 32)
    actual = embedding(write(tmp_path / "m.gguf", encoded, Quantization.Q6_K), rows=1)
    assert torch.equal(actual[0], torch.from_numpy(expected).bfloat16().float())


def test_both_compute_types_have_the_same_quantized_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf.quants.quantize(values(), Quantization.Q8_0), Quantization.Q8_0)
    half = GgufCheckpoint(path).tensor("model.embed_tokens.weight", (3, 256), torch.bfloat16)
    assert torch.equal(embedding(path), half.float())


def test_rotary_halves_are_joined() -> None:
    # One head of 4: the file has the pairs (0, 2) and (1, 3) side by side.
    assert join_rotary_halves(torch.tensor([0, 2, 1, 3]), 1).tolist() == [0, 1, 2, 3]
    two_heads = torch.tensor([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert join_rotary_halves(two_heads, 2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_names_are_translated_and_unknown_ones_kept() -> None:
    assert hugging_face_name("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
    assert hugging_face_name("blk.0.ssm_in.weight") == "blk.0.ssm_in.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"


def test_a_file_cut_off_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", values(), None).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 700, 13), *range(700, len(whole) - 64, 4999), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf") as caught:
            open_checkpoint(cut)
        assert "\n" not in str(caught.value)


def overwrite(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:offset] + data + whole[offset + len(data) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite(0, b"GGML"), "does not start with the GGUF magic"),
        (overwrite(4, b"\x01"), "version 1 is not one of"),
        (overwrite(16, b"\xff" * 8), "claims 18446744073709551615 pairs"),
        (lambda whole: whole.replace(b"token_embd.weight\x02", b"token_embd.weight\x63"), "claims 99 dimensions"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = write(tmp_path / "m.gguf", values(), None)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(path)


def test_unsupported_kinds_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "q.gguf", gguf.quants.quantize(values(), Quantization.Q5_0), Quantization.Q5_0)
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight has quantization type Q5_0, supported are F32"):
        open_checkpoint(path)
    with pytest.raises(ModelLoadError, match="architecture 'gpt2' is not supported"):
        open_checkpoint(write(tmp_path / "g.gguf", values(), None, architecture="gpt2"))
    with pytest.raises(ModelLoadError, match="no such file"):
        open_checkpoint(tmp_path / "nowhere.gguf")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", values(), None))
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight is missing"):
        checkpoint.tensor("model.norm.weight", (256,), torch.float32)
    with pytest.raises(ModelLoadError, match=r"has shape \[3, 256\], expected \[4, 256\]"):
        checkpoint.tensor("model.embed_tokens.weight", (4, 256), torch.float32)


def test_unread_weights_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", values(), None))
    with pytest.raises(ModelLoadError, match=r"a llama model does not have: model\.embed_tokens\.weight"):
        checkpoint.check_all_read()
