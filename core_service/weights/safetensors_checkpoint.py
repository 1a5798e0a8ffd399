"""A Hugging Face directory as a checkpoint: config.json and one or several safetensors files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.hf_config import read_json_object, spec_from_hf_directory
from headrace.core_service.weights.checkpoint import Checkpoint
from headrace.core_service.weights.digest import weights_digest

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUPPORTED_DTYPES = ("F32", "F16", "BF16")


class SafetensorsCheckpoint(Checkpoint):
    """Tensors of all safetensors files of a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(spec_from_hf_directory(directory), str(directory))
        self._files = _weight_files(directory)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        for path in self._files:
            self._open(path)

    def names(self) -> Iterable[str]:
        """Names of all tensors, in the order of the files."""
        return self._shapes

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError if there is none."""
        return self._shapes[name]

    def content_digest(self) -> str:
        """Hexadecimal SHA-256 that identifies the weights."""
        return weights_digest(self._files)

    def _open(self, path: Path) -> None:
        try:
            handle: Any = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelLoadError(f"{path}: no such file") from None
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path}: damaged or cut off ({error})") from None
        for name in handle.keys():  # noqa: SIM118 (not a dictionary)
            piece = handle.get_slice(name)
            if piece.get_dtype() not in SUPPORTED_DTYPES:
                raise ModelLoadError(
                    f"{path}: tensor {name} has type {piece.get_dtype()}, supported are {', '.join(SUPPORTED_DTYPES)}"
                )
            self._handles[name] = handle
            self._shapes[name] = tuple(piece.get_shape())

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        # A tensor of the same type is a view of the mapped file; the copy lets the mapping go.
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor.to(dtype, copy=True)


def _weight_files(directory: Path) -> list[Path]:
    """The files to read: those that the index names, else the single one."""
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise ModelLoadError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is here")
        return [single]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map is missing")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index}: weight_map names {outside[0]!r}, which is not a file of this directory")
    return [directory / name for name in names]
