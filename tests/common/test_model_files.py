"""Finding a model's files: paths, and a small stand-in for a model hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from headrace.common.addresses import free_port
from headrace.common.errors import StartupError
from headrace.common.model_files import Wanted, resolve_model

COMMIT = "a" * 40
SAFETENSORS_REPOSITORY = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"old format",
    "README.md": b"text",
    "onnx/model.safetensors": b"other format",
}


@dataclass
class Hub:
    """Answers the few routes that the hub's client calls, for repositories held in memory."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    address: str = ""


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            name, rest = ("/".join(parts[2:4]), parts[4:]) if is_api else ("/".join(parts[:2]), parts[2:])
            files = hub.repositories.get(name)
            hidden = name in hub.private and self.headers.get("Authorization") != "Bearer secret"
            if files is None or hidden:
                self.answer(401 if hidden else 404, b"{}", X_Error_Code="RepoNotFound")
                return
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in ("main", "v1", COMMIT):
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            elif is_api:
                self.send_repository(name, rest, files)
            else:
                self.send_file("/".join(rest[2:]), files)

        def send_repository(self, name: str, rest: list[str], files: dict[str, bytes]) -> None:
            if rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in files.items()
                ]
                self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
                return
            siblings = [{"rfilename": path} for path in files]
            content = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

        def send_file(self, path: str, files: dict[str, bytes]) -> None:
            if path not in files:
                self.answer(404, X_Error_Code="EntryNotFound")
                return
            if self.command == "GET":
                hub.fetched.append(path)
            etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
            self.answer(200, files[path], ETag=etag, X_Repo_Commit=COMMIT, Content_Type="application/octet-stream")

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.address = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask_hub(hub, tmp_path):
    """Resolves a model in a process of its own, since the hub's client reads its settings when it is imported."""

    def ask(model: str, revision: str | None = None, wanted: Wanted = Wanted.WEIGHTS, **environment: str) -> str:
        code = (
            "import sys\n"
            "from headrace.common.errors import StartupError\n"
            "from headrace.common.model_files import Wanted, resolve_model\n"
            f"try: print(resolve_model({model!r}, {revision!r}, Wanted({wanted.value!r})).path)\n"
            "except StartupError as error: print('refused:', error)\n"
            "assert 'torch' not in sys.modules\n"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HEADRACE_"))}
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **environment,
        }
        ended = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**clean, **settings},
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert len(lines) == 1
        return lines[0]

    return ask


def test_only_the_files_that_are_needed_are_fetched_and_only_once(hub, ask_hub):
    hub.repositories["org/llama"] = SAFETENSORS_REPOSITORY
    path = Path(ask_hub("org/llama"))
    wanted = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert {file.name for file in path.iterdir()} == wanted
    assert (path / "model-00002-of-00002.safetensors").read_bytes() == b"second"
    assert sorted(hub.fetched) == sorted(wanted)
    assert Path(ask_hub("org/llama")) == path
    assert len(hub.fetched) == len(wanted)


def test_a_gateway_fetches_no_weights(hub, ask_hub):
    hub.repositories["org/llama"] = SAFETENSORS_REPOSITORY
    path = Path(ask_hub("org/llama", wanted=Wanted.TOKENIZER))
    assert (path / "tokenizer.json").exists()
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_the_only_gguf_file_of_a_repository_is_taken(hub, ask_hub):
    hub.repositories["org/small"] = {"small.gguf": b"GGUF", "mmproj-small.gguf": b"GGUF", "README.md": b""}
    assert Path(ask_hub("org/small")).read_bytes() == b"GGUF"
    assert hub.fetched == ["small.gguf"]


def test_of_several_gguf_files_one_must_be_named(hub, ask_hub):
    hub.repositories["org/many"] = {"a.Q4_1.gguf": b"GGUFa", "b.Q8_0.gguf": b"GGUFb"}
    assert ask_hub("org/many").startswith(
        "refused: model org/many: has several .gguf files, name one of them: org/many/a"
    )
    assert Path(ask_hub("org/many/b.Q8_0.gguf")).read_bytes() == b"GGUFb"
    assert hub.fetched == ["b.Q8_0.gguf"]
    assert "the hub has no such file" in ask_hub("org/many/c.gguf")


def test_a_revision_is_passed_on(hub, ask_hub):
    hub.repositories["org/llama"] = SAFETENSORS_REPOSITORY
    assert COMMIT in ask_hub("org/llama", "v1")
    assert ask_hub("org/llama", "v9").startswith("refused: model org/llama at revision v9: ")


def test_a_token_opens_a_private_repository(hub, ask_hub):
    hub.repositories["org/secret"], hub.private = SAFETENSORS_REPOSITORY, {"org/secret"}
    assert "a private one needs HF_TOKEN" in ask_hub("org/secret")
    assert Path(ask_hub("org/secret", HF_TOKEN="secret")).is_dir()


def test_an_unknown_repository_is_one_clear_line(hub, ask_hub):
    assert ask_hub("org/none") == (
        f"refused: model org/none: is neither a path here nor a repository at {hub.address} "
        "(a private one needs HF_TOKEN)"
    )


def test_a_repository_without_usable_files_is_one_clear_line(hub, ask_hub):
    hub.repositories["org/empty"] = {"pytorch_model.bin": b"", "config.json": b"{}"}
    assert "neither *.safetensors nor a .gguf file" in ask_hub("org/empty")


def test_what_was_fetched_is_used_when_the_hub_is_out_of_reach(hub, ask_hub):
    hub.repositories["org/llama"] = SAFETENSORS_REPOSITORY
    hub.repositories["org/small"] = {"small.gguf": b"GGUF"}
    gone = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port('127.0.0.1')}"}
    for model in ("org/llama", "org/small"):
        path = ask_hub(model)
        assert ask_hub(model, **gone) == path
    assert "out of reach" in ask_hub("org/other", **gone)


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_paths_are_taken_as_they_are_and_name_the_model(tmp_path, monkeypatch):
    directory = write(tmp_path / "llama", "config.json", "model.safetensors")
    file = write(tmp_path / "files", "small.Q4_1.gguf") / "small.Q4_1.gguf"
    assert resolve_model(str(directory)).path == directory
    assert resolve_model(str(directory)).name == "llama"
    assert resolve_model(str(file)).path == file
    assert resolve_model(str(file)).name == "small.Q4_1"
    assert resolve_model(str(tmp_path / "files")).path == file  # its only GGUF file
    monkeypatch.chdir(tmp_path)
    assert resolve_model("llama").path.samefile(directory)
    assert resolve_model("files/small.Q4_1.gguf").path.samefile(file)


def test_a_tokenizer_needs_no_weights(tmp_path):
    directory = write(tmp_path / "tokenizer", "tokenizer.json")
    assert resolve_model(str(directory), wanted=Wanted.TOKENIZER).path == directory
    with pytest.raises(StartupError, match=r"config\.json"):
        resolve_model(str(directory))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "has neither config.json nor a .gguf file"),
        (("config.json", "pytorch_model.bin"), "has no .safetensors files"),
        (("a.gguf", "b.gguf"), "several .gguf files, name one of them: a.gguf, b.gguf"),
    ],
)
def test_a_directory_without_a_model_is_one_clear_line(tmp_path, names, said):
    with pytest.raises(StartupError, match=said):
        resolve_model(str(write(tmp_path / "model", *names)))


@pytest.mark.parametrize(
    "model", ["/no/such", "./no/such", "~/no/such", "no-such.gguf", "no/such.gguf", "a b", "a/b/c/d", ""]
)
def test_a_missing_path_is_one_clear_line_without_asking_a_hub(model):
    with pytest.raises(StartupError, match="no such file or directory"):
        resolve_model(model)


def test_a_word_that_is_no_path_is_told_what_a_model_may_be():
    with pytest.raises(StartupError, match=r"hub ids are org/name, the demo is `demo`$"):
        resolve_model("foo")


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"not a \.gguf file"):
        resolve_model(str(write(tmp_path / "model", "model.bin") / "model.bin"))


def test_a_revision_belongs_to_a_hub_id():
    for model in ("demo", "/no/such"):
        with pytest.raises(StartupError, match="revision v1 belongs to a hub id"):
            resolve_model(model, "v1")


def test_demo_is_the_demo_model(tmp_path, monkeypatch):
    from headrace.common import model_files

    monkeypatch.setattr(model_files, "fetch_demo_model", lambda: tmp_path / "demo.gguf")
    assert resolve_model("demo") == model_files.ModelFiles(tmp_path / "demo.gguf", "demo")
