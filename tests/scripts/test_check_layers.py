"""The layer check sees what importing a module would bring in, and nothing else."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_layers.py"


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def chain(layers: ModuleType, sources: dict[str, str]) -> list[str] | None:
    """The chain from module `start` to torch through modules with these sources."""
    imports = {name: list(layers._imports(ast.parse(source).body, True)) for name, source in sources.items()}
    found: list[str] | None = layers.chain_to("start", ("torch",), imports)
    return found


@pytest.mark.parametrize(
    "statement",
    ["import torch", "import torch.nn as nn", "from torch import nn", "try:\n  import torch\nexcept ImportError: pass"],
)
def test_an_import_at_module_level_is_reached(layers: ModuleType, statement: str) -> None:
    assert chain(layers, {"start": statement}) is not None


def test_imports_are_followed_through_modules(layers: ModuleType) -> None:
    sources = {
        "start": "from package import middle",
        "package.middle": "import package.end",
        "package.end": "import torch",
    }
    assert chain(layers, sources) == ["start", "package.middle", "package.end", "torch"]


@pytest.mark.parametrize(
    "statement",
    ["def run():\n  import torch", "if TYPE_CHECKING:\n  import torch", "import torchlight", "text = 'import torch'"],
)
def test_what_importing_does_not_bring_is_not_reached(layers: ModuleType, statement: str) -> None:
    assert chain(layers, {"start": statement}) is None


def test_every_hand_written_module_is_seen_through_the_links(layers: ModuleType) -> None:
    files = layers.module_files()
    assert {"headrace", "headrace.gateway.version", "headrace.core_service.version"} <= set(files)
    assert not [name for name in files if name.endswith("_pb2")]
