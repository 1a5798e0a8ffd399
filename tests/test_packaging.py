"""Laws of the distribution: what its wheel holds, what each extra brings, which part lives without which other part."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headrace"
LINKS = {
    PACKAGE / "gateway": "../../gateway",
    PACKAGE / "core_service": "../../core_service",
    PACKAGE / "kernels": "../../kernels",
    PACKAGE / "gateway_api": "../../protos/headrace/gateway_api",
    PACKAGE / "core_api": "../../protos/headrace/core_api",
    PACKAGE / "common" / "v1": "../../../protos/headrace/common/v1",
}
SOURCE_FOLDERS = ("src", "gateway", "core_service", "kernels", "protos")


def run(*command: str | Path, **environment: str) -> str:
    """Runs a command outside the repository, so that nothing is found by the current folder; returns its output."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the source, since a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_links_to_the_top_level_folders_are_relative() -> None:
    """An absolute link would point out of a clone."""
    assert {path: os.readlink(path) for path in LINKS} == LINKS


def test_namespace_folders_hold_no_init_file() -> None:
    """With one, `import kernels` from the repository's root would shadow the package that transformers imports."""
    folders = ("gateway", "core_service", "kernels", "tests", "protos")
    assert [path for folder in folders for path in (ROOT / folder).rglob("__init__.py")] == []


def test_wheel_has_no_other_top_level_package(wheel_files: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_files} == {"headrace"}


def test_wheel_holds_every_source_file(wheel_files: set[str]) -> None:
    """Python code, generated code and its types, the protos, C++, and the mark that says that all is typed."""
    wanted = {"headrace/py.typed"}
    for link_or_folder in (PACKAGE, *LINKS):
        for path in link_or_folder.rglob("*"):
            if path.suffix in {".py", ".pyi", ".proto", ".cpp", ".h"} and path.is_file():
                wanted.add(str(path.relative_to(PACKAGE.parent)))
    assert wanted - wheel_files == set()


@pytest.fixture(scope="module")
def gateway_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with `headrace[gateway]`."""
    environment = tmp_path_factory.mktemp("gateway") / "venv"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, f"{wheel}[gateway]")
    return python


def test_gateway_environment_serves_without_torch(gateway_python: Path) -> None:
    run(gateway_python, "-I", "-c", "import headrace.gateway.main, headrace.cli.main, headrace.client")
    check = "import importlib.util as u; print([name for name in ('torch', 'triton') if u.find_spec(name)])"
    assert run(gateway_python, "-I", "-c", check) == "[]\n"
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        run(gateway_python, "-I", "-c", "import torch")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("headrace.gateway.main", ("core_service", "kernels")),
        ("headrace.cli.gateway", ("core_service", "kernels")),
        ("headrace.cli.health", ("core_service", "kernels", "gateway")),
        ("headrace.client", ("core_service", "kernels", "gateway")),
        ("headrace.core_service.main", ("gateway",)),
        ("headrace.cli.core", ("gateway",)),
    ],
)
def test_each_service_imports_without_the_folder_of_the_other(
    module: str, absent: tuple[str, ...], wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for folder in absent:
        shutil.rmtree(tmp_path / "headrace" / folder)
    found = run(sys.executable, "-c", f"import headrace, {module}; print(headrace.__file__)", PYTHONPATH=str(tmp_path))
    assert found.splitlines()[-1] == str(tmp_path / "headrace" / "__init__.py")


@pytest.mark.parametrize("protobuf", ["protobuf==6.33.5", "protobuf>=7,<8"])
def test_generated_code_imports_with_every_supported_protobuf(protobuf: str, tmp_path: Path) -> None:
    """The oldest release that pyproject.toml allows, and the newest there is."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, protobuf)
    generated = sorted((ROOT / "protos").rglob("*_pb2*.py"))
    modules = [".".join(path.relative_to(ROOT / "protos").with_suffix("").parts) for path in generated]
    code = f"import google.protobuf, headrace.common.rpc_status, {', '.join(modules)}; print(google.protobuf.__file__)"
    found = run(sys.executable, "-W", "error", "-c", code, PYTHONPATH=str(tmp_path))
    assert Path(found.splitlines()[-1]).is_relative_to(tmp_path)
