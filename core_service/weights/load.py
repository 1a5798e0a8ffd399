"""Opens whatever a model path points at."""

from pathlib import Path

from headrace.common.errors import ModelLoadError
from headrace.core_service.weights.checkpoint import Checkpoint
from headrace.core_service.weights.gguf_checkpoint import GgufCheckpoint
from headrace.core_service.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face directory or a GGUF file; ModelLoadError when it is neither, damaged or not supported."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    return GgufCheckpoint(path)
