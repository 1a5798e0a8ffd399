"""A GGUF file with its tensors: where each lies and how it is encoded. The gguf library does the dequantizing."""

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from headrace.common.errors import ModelLoadError
from headrace.common.gguf_metadata import TensorPlace, read_gguf_header


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies and how it is encoded."""

    name: str
    shape: tuple[int, ...]  # PyTorch's order: the fastest dimension last
    quantization: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file. `metadata` holds every value of its header, arrays as tuples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = read_gguf_header(self._data, with_tensors=True)
        except FileNotFoundError:
            raise ModelLoadError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped, or a damaged header
            raise ModelLoadError(f"{path}: cannot be read as GGUF: {error}") from None
        self.metadata = header.pairs
        self.tensors = {place.name: self._locate(place) for place in header.tensors}

    def tensor_bytes(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The encoded tensor as [num_bytes], read straight from the mapped file; do not write to it."""
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _locate(self, place: TensorPlace) -> GgufTensor:
        name, offset, shape = place.name, place.offset, tuple(reversed(place.dimensions))
        try:
            quantization = gguf.GGMLQuantizationType(place.type_id)
        except ValueError:
            raise ModelLoadError(f"{self.path}: tensor {name} has unknown quantization type {place.type_id}") from None
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        num_elements = prod(shape)
        if not shape or shape[-1] % block_elements:
            raise ModelLoadError(
                f"{self.path}: tensor {name} of shape {list(shape)} does not fit {quantization.name} blocks "
                f"of {block_elements}"
            )
        num_bytes = num_elements // block_elements * block_bytes
        if offset + num_bytes > len(self._data):
            raise ModelLoadError(
                f"{self.path}: cut off: tensor {name} ends at byte {offset + num_bytes}, the file at {len(self._data)}"
            )
        return GgufTensor(name, shape, quantization, offset, num_bytes)
