"""Compiles the C++ kernels. The standard library only, so that an image can be built with it before anything else:

python native_compiler.py FOLDER      compiles for every instruction set of this kind of machine into FOLDER
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent
SOURCES = ("paged_attention.cpp", "elementwise.cpp")
HEADERS = ("attention_worker.h", "products.h", "vectors.h")
COMPILERS = ("g++", "c++")
COMPILE_SECONDS = 120
# No contraction: every rounding is written down. OpenMP is compiled in but not linked: its functions come from the
# runtime that torch has loaded, so that a process has one pool of threads, not two that fight for the cores.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fopenmp",
    "-fPIC",
    "-w",
)
LINK_FLAGS = ("-shared", "-Wl,--as-needed")

_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
# Instruction sets by name, best first: the CPU flags that each needs, as /proc/cpuinfo spells them.
X86_INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}


class CompileError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Instruction sets that can be compiled for this kind of machine, best first, with the CPU flags that they need."""
    return X86_INSTRUCTIONS if platform.machine() in ("x86_64", "AMD64") else {"generic": ()}


def best_instructions() -> str:
    """The best instruction set that this CPU has."""
    present = cpu_flags()
    return next(name for name, needed in instruction_sets().items() if present.issuperset(needed))


def cpu_flags() -> set[str]:
    """The first CPU's flags, as /proc/cpuinfo spells them; none where it has none."""
    return set(_cpu_fact("flags").split())


def cpu_kind() -> str:
    """What libraries choose their arithmetic by: the CPU's vendor and its vector and matrix instructions."""
    vector = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma")))
    return " ".join((platform.machine(), _cpu_fact("vendor_id"), *vector))


def _cpu_fact(name: str) -> str:
    """Of the first CPU; empty where /proc/cpuinfo does not say."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


@functools.cache
def source_digest() -> str:
    """Of the sources and of how they are compiled; hexadecimal."""
    digest = hashlib.sha256(" ".join((*COMPILE_FLAGS, *LINK_FLAGS)).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update(name.encode() + b"\0" + (SOURCE_FOLDER / name).read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> str | None:
    """Path of the C++ compiler: the one that CXX names, else a usual one."""
    if chosen := os.environ.get("CXX"):
        return shutil.which(chosen)
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compiler_version(compiler: str) -> str:
    """The first line of what it says of itself. CompileError if it does not start."""
    return _run([compiler, "--version"]).partition("\n")[0]


def compile_kernels(compiler: str, instructions: str, target: Path) -> None:
    """Compiles into `target`, which appears whole or not at all. CompileError with the compiler's first complaint."""
    flags = [f"-m{flag.replace('_', '')}" for flag in instruction_sets()[instructions]]
    sources = [str(SOURCE_FOLDER / name) for name in SOURCES]
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        objects = []
        for source in sources:
            objects.append(str(Path(folder) / (Path(source).name + ".o")))
            _run([compiler, *COMPILE_FLAGS, *flags, "-c", source, "-o", objects[-1]])
        _run([compiler, *LINK_FLAGS, *objects, "-o", str(partial)])
        seal(partial)
        os.replace(partial, target)


def seal(library: Path) -> None:
    """Appends a digest of a library to it, so that a damaged one is found before it is loaded; loaders ignore it."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)


def is_sealed(library: Path) -> bool:
    """Whether the file is there and whole."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


def prebuilt_name(instructions: str) -> str:
    """File name of a library that was compiled ahead, on another machine."""
    return f"{instructions}-{source_digest()[:24]}.so"


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMPILE_SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error
    if result.returncode != 0:
        lines = [line for line in result.stdout.splitlines() if "error" in line] or result.stdout.splitlines()
        raise CompileError(f"{command[0]} failed with exit code {result.returncode}: {lines[0] if lines else ''}")
    return result.stdout


def main() -> None:
    """Compiles ahead, for whatever CPU of this kind of machine will run it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    if compiler is None:
        sys.exit("no C++ compiler was found")
    for instructions in instruction_sets():
        compile_kernels(compiler, instructions, folder / prebuilt_name(instructions))


if __name__ == "__main__":
    main()
