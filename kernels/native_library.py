"""Finds the compiled kernels, or compiles them, once for a user and machine, into the cache."""

import ctypes
import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch  # noqa: F401 loads the OpenMP runtime that the kernels use

from headrace.common.demo_model import cache_dir
from headrace.kernels.native_compiler import (
    SOURCE_FOLDER,
    CompileError,
    best_instructions,
    compile_kernels,
    compiler_version,
    find_compiler,
    is_sealed,
    prebuilt_name,
    source_digest,
)

# Where an image keeps what it compiled ahead.
PREBUILT_FOLDER = SOURCE_FOLDER / "prebuilt"

log = structlog.get_logger(__name__)


class NativeUnavailable(Exception):
    """There are no compiled kernels to be had here; the message says why and what would help."""


def load_library(instructions: str | None = None, cache: Path | None = None) -> ctypes.CDLL:
    """Loads the kernels for an instruction set (default: the best that this CPU has), compiling them first if need be.

    `cache` is the folder that keeps them (default: kernels/ in the user's cache). NativeUnavailable if that fails.
    """
    instructions = instructions or best_instructions()
    prebuilt = PREBUILT_FOLDER / prebuilt_name(instructions)
    path = prebuilt if is_sealed(prebuilt) else _compiled(instructions, cache or cache_dir() / "kernels")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error


def _compiled(instructions: str, cache: Path) -> Path:
    """Path of the library in the cache."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler was found; install g++ (Debian: apt-get install g++)")
    try:
        version = compiler_version(compiler)
        key = hashlib.sha256(f"{source_digest()}\n{version}\n{instructions}".encode()).hexdigest()
        path = cache / f"{instructions}-{key[:24]}.so"
        if is_sealed(path):
            return path
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_suffix(".lock")):
            if not is_sealed(path):  # else another process compiled it meanwhile
                log.info("compiling the kernels", instructions=instructions, compiler=version, path=str(path))
                compile_kernels(compiler, instructions, path)
    except CompileError as error:
        raise NativeUnavailable(f"{error}; a g++ of version 10 or newer with its headers is needed") from error
    except OSError as error:
        raise NativeUnavailable(f"compiled kernels cannot be kept in {cache}: {error}") from error
    return path


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a lock among processes; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
