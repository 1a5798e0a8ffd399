"""Which compute type is chosen, and that loading shows its progress where it was asked to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.common.errors import ModelLoadError
from headrace.core_service.models import registry
from headrace.core_service.models.registry import load_model, resolve_dtype


def test_auto_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_bfloat16_kernels", lambda: True)
    assert resolve_dtype("auto") == resolve_dtype("bfloat16") == torch.bfloat16
    monkeypatch.setattr(registry, "has_bfloat16_kernels", lambda: False)
    assert resolve_dtype("auto") == resolve_dtype("float32") == torch.float32
    with pytest.raises(ModelLoadError, match="bfloat16 needs a CPU"):
        resolve_dtype("bfloat16")


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="'float8' is not supported"):
        resolve_dtype("float8")


def test_progress_is_shown_when_asked_for(
    tmp_path: Path, make_hf_model: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    make_hf_model("Llama")
    capfd.readouterr()
    load_model(tmp_path, torch.float32)
    assert capfd.readouterr().err == ""
    load_model(tmp_path, torch.float32, progress=True)
    assert "loading weights: 100%" in capfd.readouterr().err


def test_a_wrong_shape_ends_in_one_line(tmp_path: Path, make_hf_model: Callable[..., Any]) -> None:
    make_hf_model("Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight has shape \[48, 32\], expected \[40, 32\]"):
        load_model(tmp_path, torch.float32)
