"""Equal weights have equal digests, others have others."""

from pathlib import Path

import pytest

from headrace.core_service.weights import digest
from headrace.core_service.weights.digest import weights_digest


def write(path: Path, data: bytes | bytearray) -> Path:
    path.write_bytes(data)
    return path


def test_order_and_folder_do_not_matter(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    files = [write(tmp_path / "b", b"2"), write(tmp_path / "a", b"1")]
    copies = [write(other / "a", b"1"), write(other / "b", b"2")]
    assert weights_digest(files) == weights_digest(copies)


def test_bytes_may_not_move_between_files(tmp_path: Path) -> None:
    one = weights_digest([write(tmp_path / "a", b"12"), write(tmp_path / "b", b"3")])
    two = weights_digest([write(tmp_path / "a", b"1"), write(tmp_path / "b", b"23")])
    assert one != two


def test_small_files_are_hashed_whole(tmp_path: Path) -> None:
    data = bytearray(100_000)
    before = weights_digest([write(tmp_path / "a", data)])
    data[54_321] = 1
    assert weights_digest([write(tmp_path / "a", data)]) != before


@pytest.mark.parametrize("changed", [0, 99, 100, 300, 999])
def test_large_files_are_sampled_at_header_steps_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    monkeypatch.setattr(digest, "WHOLE_CONTENT_LIMIT", 500)
    monkeypatch.setattr(digest, "HEADER_BYTES", 100)
    monkeypatch.setattr(digest, "SAMPLE_EVERY", 200)
    monkeypatch.setattr(digest, "SAMPLE_BYTES", 10)
    data = bytearray(1000)
    before = weights_digest([write(tmp_path / "a", data)])
    data[changed] = 1
    assert weights_digest([write(tmp_path / "a", data)]) != before
