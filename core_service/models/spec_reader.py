"""Reads a model's shape without its weights, and without torch."""

from pathlib import Path

from headrace.common.errors import ModelLoadError
from headrace.core_service.models.gguf_config import spec_from_gguf
from headrace.core_service.models.hf_config import spec_from_hf_directory
from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.weights.gguf_file import GgufFile


def read_model_spec(path: Path) -> ModelSpec:
    """The shape of the model at `path` (a GGUF file or a Hugging Face directory); ModelLoadError as for loading it."""
    if path.is_dir():
        return spec_from_hf_directory(path)
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    return spec_from_gguf(GgufFile(path))
