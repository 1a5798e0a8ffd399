"""Reads the header of a GGUF file: the key-value pairs, and where the tensors lie.

Layout (GGUF specification, versions 2 and 3, little-endian): magic, version u32, tensor count u64, pair count u64,
then the pairs: key string, value type u32, value; then the tensors: name string, number of dimensions u32, dimensions
u64 (the fastest first), type u32, offset u64 from the start of the data, which is the next multiple of the alignment.
A string is a u64 length and UTF-8 bytes; an array is an element type u32, a u64 count and the elements.

The `gguf` package keeps a Python object for every array element: 2 s for a vocabulary of 49,152 tokens. This reader
takes a few hundredths of a second, so that a gateway can be live and a core ready in time.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.common.errors import StartupError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# A header that claims more than this is corrupt: vocabularies have below a million entries.
MAX_ARRAY_LENGTH = 1 << 24
MAX_PAIRS = 1 << 16
MAX_DIMENSIONS = 8
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """What the header says of one tensor."""

    name: str
    dimensions: tuple[int, ...]  # the fastest first
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A whole header."""

    pairs: dict[str, Any]
    tensors: tuple[TensorPlace, ...]


def is_gguf(path: Path) -> bool:
    """True if the file starts with the GGUF magic."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All pairs of the header: numbers, bools, `str`, and arrays of these as tuples.

    Raises StartupError if the file cannot be read, is no GGUF file of a known version, or ends inside its header.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_gguf_header(data, with_tensors=False).pairs
    except (OSError, ValueError) as error:  # ValueError: mmap of an empty file, or our own complaint
        raise StartupError(f"cannot read GGUF file {path}: {error}") from error


def read_gguf_header(data: mmap.mmap, *, with_tensors: bool) -> GgufHeader:
    """The header of a mapped file; without tensors it is read no further than the pairs.

    Raises ValueError with what is wrong.
    """
    reader = _Reader(data)
    try:
        num_tensors, num_pairs = reader.counts()
        pairs = reader.pairs(num_pairs)
        tensors = reader.tensors(num_tensors, pairs.get("general.alignment", DEFAULT_ALIGNMENT)) if with_tensors else ()
    except struct.error as error:
        raise ValueError("it ends inside its header") from error
    return GgufHeader(pairs, tensors)


class _Reader:
    """A cursor over the file's bytes; complains with ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def counts(self) -> tuple[int, int]:
        """Numbers of tensors and of pairs."""
        if self.data[:4] != MAGIC:
            raise ValueError("it does not start with the GGUF magic")
        self.at = 4
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version} is not one of {SUPPORTED_VERSIONS}")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        if num_pairs > MAX_PAIRS:
            raise ValueError(f"its header claims {num_pairs} pairs, more than {MAX_PAIRS}")
        return num_tensors, num_pairs

    def pairs(self, num_pairs: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            pairs[key] = self._value(self._scalar("I"))
        return pairs

    def tensors(self, num_tensors: int, alignment: Any) -> tuple[TensorPlace, ...]:
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}, expected a positive number")
        entries = [self._tensor() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return tuple(TensorPlace(name, dimensions, kind, start + offset) for name, dimensions, kind, offset in entries)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} claims {num_dimensions} dimensions, more than {MAX_DIMENSIONS}")
        dimensions = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, dimensions, self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> tuple[str, ...]:
        # The one hot loop of the reader: local names, no calls to other methods.
        data, at, read_length = self.data, self.at, _U64.unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + read_length(data, at)[0]
            if at > len(data):
                raise ValueError("it ends inside its header")
            # Some writers store raw bytes; such a piece must not keep the rest of the file from loading.
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return tuple(found)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"its header holds a value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> tuple[Any, ...]:
        if count > MAX_ARRAY_LENGTH:
            raise ValueError(f"its header claims an array of {count} elements, more than {MAX_ARRAY_LENGTH}")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return tuple(self._value(_ARRAY) for _ in range(count))
        if kind not in _SCALARS:
            raise ValueError(f"its header holds an array of unknown type {kind}")
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values
