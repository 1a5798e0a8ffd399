"""A GGUF file as a checkpoint: names translated, weights dequantized, llama's head permutation undone."""

import re
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.gguf_config import ROPE_FREQUENCIES, spec_from_gguf
from headrace.core_service.weights.checkpoint import Checkpoint
from headrace.core_service.weights.digest import weights_digest
from headrace.core_service.weights.gguf_file import GgufFile, GgufTensor

SUPPORTED_QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# Values of all other types are rounded to bfloat16 whatever the compute type is. The rounding is far below the error
# of the quantization, and it makes a float32 run the reference of a bfloat16 run: both compute with the same weights.
FLOAT_TYPES = ("F32", "F16", "BF16")

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint(Checkpoint):
    """Tensors of a GGUF file under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        super().__init__(spec_from_gguf(self._file), str(path))
        self._tensors = {
            hugging_face_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name != ROPE_FREQUENCIES  # read with the configuration
        }
        for tensor in self._tensors.values():
            if tensor.quantization.name not in SUPPORTED_QUANTIZATIONS:
                raise ModelLoadError(
                    f"{path}: tensor {tensor.name} has quantization type {tensor.quantization.name}, "
                    f"supported are {', '.join(SUPPORTED_QUANTIZATIONS)}"
                )

    def names(self) -> Iterable[str]:
        """Names of all tensors, in the order of the file."""
        return self._tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in PyTorch's order; KeyError if there is none."""
        return self._tensors[name].shape

    def content_digest(self) -> str:
        """Hexadecimal SHA-256 that identifies the weights."""
        return weights_digest([self._file.path])

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        located = self._tensors[name]
        tensor = self._dequantize(located)
        if located.quantization.name not in FLOAT_TYPES:
            tensor = tensor.to(torch.bfloat16)
        tensor = tensor.to(dtype)
        if self.spec.architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = self.spec.num_heads if ".q_proj." in name else self.spec.num_kv_heads
            return join_rotary_halves(tensor, heads)
        return tensor

    def _dequantize(self, tensor: GgufTensor) -> torch.Tensor:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor.quantization]
        # [rows, bytes of a row]
        encoded = self._file.tensor_bytes(tensor).reshape(-1, tensor.shape[-1] // block_elements * block_bytes)
        values = gguf.quants.dequantize(encoded, tensor.quantization)
        # A copy where the library returned a view of the mapped file, which is read-only.
        return torch.from_numpy(np.require(values, requirements="W").reshape(tensor.shape))


def hugging_face_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; a name that is not known stays as it is."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return _GLOBAL_NAMES.get(name, name)
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def join_rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes the row order of GGUF's llama query and key weights.

    There the two dimensions that a rotation mixes lie side by side (0, 1), (2, 3), ...; here, as in Hugging Face's
    weights, they are half a head apart (0, d/2), (1, d/2 + 1), ... A bias is permuted in the same way.
    """
    # weight [num_heads * head_dim, ...]
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)
