"""Kernels are compiled once, found again, replaced when damaged, and done without where they cannot be had."""

import ctypes
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.kernels import native_compiler, native_library
from headrace.kernels.best_kernels import best_kernels
from headrace.kernels.native_compiler import instruction_sets, is_sealed, prebuilt_name
from headrace.kernels.native_library import NativeUnavailable, load_library

pytestmark = pytest.mark.skipif(native_compiler.find_compiler() is None, reason="there is no C++ compiler")

GENERIC = "generic"
FAKE_COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  --version) echo "fake 1.0"; exit 0;;
esac
echo "x.cpp:1:1: fatal error: no such header" >&2
exit {code}
"""


def instructions_of(library: ctypes.CDLL) -> str:
    library.headrace_instructions.restype = ctypes.c_char_p
    name: bytes = library.headrace_instructions()
    return name.decode()


def libraries(cache: Path) -> list[Path]:
    return list(cache.glob("*.so"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one library."""
    cache = tmp_path_factory.mktemp("cache") / "kernels"
    load_library(GENERIC, cache)
    return cache


def test_it_is_compiled_once(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (library,) = libraries(compiled)
    before = library.stat()
    assert instructions_of(load_library(GENERIC, compiled)) == GENERIC
    assert library.stat() == before
    assert "compiling" not in capsys.readouterr().out
    assert {path.suffix for path in compiled.iterdir()} == {".so", ".lock"}  # nothing half-done is left


@pytest.mark.parametrize("damage", [b"", b"not a library", None], ids=["empty", "other", "cut"])
def test_a_damaged_library_is_compiled_again(compiled: Path, tmp_path: Path, damage: bytes | None) -> None:
    (library,) = libraries(compiled)
    broken = tmp_path / library.name
    whole = library.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert instructions_of(load_library(GENERIC, tmp_path)) == GENERIC
    assert is_sealed(broken)


def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=load_library, args=(GENERIC, tmp_path)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    (library,) = libraries(tmp_path)
    assert is_sealed(library)


@pytest.mark.parametrize(
    ("name", "other"), [("compiler_version", lambda _: "other 2.0"), ("source_digest", lambda: "0" * 64)]
)
def test_another_compiler_or_source_means_another_library(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: Callable[..., str]
) -> None:
    (known,) = libraries(compiled)
    targets: list[Path] = []
    monkeypatch.setattr(native_library, name, other)
    monkeypatch.setattr(native_library, "compile_kernels", lambda *arguments: targets.append(arguments[-1]))
    with pytest.raises(NativeUnavailable):  # nothing was compiled, so nothing can be loaded
        load_library(GENERIC, compiled)
    assert [path.name == known.name for path in targets] == [False]


def test_a_library_that_was_compiled_ahead_needs_no_compiler(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "PREBUILT_FOLDER", tmp_path)
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    (tmp_path / prebuilt_name(GENERIC)).write_bytes(libraries(compiled)[0].read_bytes())
    assert instructions_of(load_library(GENERIC, tmp_path / "cache")) == GENERIC


def test_all_are_compiled_ahead_without_anything_installed(tmp_path: Path) -> None:
    script = Path(native_compiler.__file__)
    subprocess.run([sys.executable, "-S", script, tmp_path], check=True, cwd="/", timeout=200)
    assert {path.name for path in tmp_path.iterdir()} == {prebuilt_name(name) for name in instruction_sets()}
    assert all(is_sealed(path) for path in tmp_path.iterdir())


def test_without_a_compiler_plain_pytorch_serves_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert best_kernels().name == "torch"
    (line,) = capsys.readouterr().out.splitlines()
    assert "no compiled kernels" in line
    assert "install g++" in line


@pytest.mark.parametrize("code", [0, 1])
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(FAKE_COMPILER.format(log=calls, code=code))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    wanted = "fatal error: no such header" if code else "cannot be kept"  # it says that it worked, but wrote nothing
    with pytest.raises(NativeUnavailable, match=wanted):
        load_library(GENERIC, tmp_path / "cache")
    assert "-c" in calls.read_text()
    assert libraries(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="cannot be kept in"):
        load_library(GENERIC, tmp_path / "file")


def test_the_process_has_one_openmp_runtime() -> None:
    torch.set_num_threads(2)
    kernels = best_kernels()
    kernels.silu_mul(torch.randn(64, 4096))  # enough to wake the threads
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len({path.resolve() for path in mapped if path.name.startswith(("libgomp", "libomp", "libiomp"))}) == 1
