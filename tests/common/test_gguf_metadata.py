"""The lean reader of GGUF headers."""

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter

from headrace.common.errors import StartupError
from headrace.common.gguf_metadata import is_gguf, read_gguf_metadata


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_string("text", "né 👍")
    writer.add_bool("flag", True)
    writer.add_uint8("small", 200)
    writer.add_int32("negative", -7)
    writer.add_uint64("large", 2**63)
    writer.add_float32("half", 0.5)
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, -1.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    read = read_gguf_metadata(path)
    reference = {
        name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")
    }
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in read.items()} == reference


@pytest.mark.parametrize("length", [0, 3, 4, 10, 30, 100])
def test_a_file_cut_short_is_refused_with_one_line(tmp_path: Path, length: int) -> None:
    whole = write_gguf(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:length])
    with pytest.raises(StartupError, match=r"cannot read GGUF file .*cut\.gguf: "):
        read_gguf_metadata(cut)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (b"PK\x03\x04" + bytes(40), "magic"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "pairs"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**50), "elements"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
    ],
)
def test_a_corrupt_header_is_refused_by_name(tmp_path: Path, contents: bytes, complaint: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(contents)
    with pytest.raises(StartupError, match=complaint):
        read_gguf_metadata(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_is_gguf_looks_at_the_magic_only(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    assert not is_gguf(text)
    assert not is_gguf(tmp_path / "none")
    assert is_gguf(write_gguf(tmp_path / "a.gguf"))
