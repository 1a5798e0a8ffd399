"""What cannot work says why in one clear line and ends with a failure: no stack trace, no hanging process."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time

import pytest

from headrace.common.addresses import free_port
from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import load_tokenizer_files

TIMEOUT_S = 120  # ends a test that would hang
HEADER_BYTES = 24
METADATA_BYTES = 500_000  # the demo model's metadata, which ends with its vocabulary, is longer
TENSOR_BYTES = 40_000_000  # and its tensors are longer than this


def headrace(*words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
    )


def only_line(result: "subprocess.CompletedProcess[str]") -> str:
    """What a command that failed said on stderr, which is one line; log lines are left out."""
    assert result.returncode != 0
    assert "Traceback" not in result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if not is_log_line(line)]
    assert len(lines) == 1, result.stderr
    return lines[0]


def is_log_line(line: str) -> bool:
    if not line.startswith('{"timestamp"'):
        return False
    entry = json.loads(line)
    assert entry["level"] in ("info", "warning"), line
    return True


def gguf(version: int = 3, num_tensors: int = 0, num_fields: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def broken_models() -> "dict[str, bytes]":
    return {
        "empty": b"",
        "garbage": bytes(range(256)) * 64,
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98000000\n",
        "header-cut-off": gguf()[: HEADER_BYTES - 4],
        "unknown-version": gguf(version=99),
        "nothing-inside": gguf(),
        "absurd-counts": gguf(num_tensors=2**60, num_fields=2**60),
        "metadata-cut-off": b"",
        "tensors-cut-off": b"",
        "last-byte-missing": b"",
        "wrong-magic": b"",
    }


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    """A broken GGUF file, by name."""
    directory = tmp_path_factory.mktemp("models")

    def make(name):
        path = directory / f"{name}.gguf"
        contents = broken_models()[name]
        if not contents and name != "empty":
            whole = resolve_model("demo").path.read_bytes()
            assert len(whole) > TENSOR_BYTES
            contents = {
                "metadata-cut-off": whole[:METADATA_BYTES],
                "tensors-cut-off": whole[:TENSOR_BYTES],
                "last-byte-missing": whole[:-1],
                "wrong-magic": b"GGML" + whole[4:],
            }[name]
        path.write_bytes(contents)
        return path

    return make


@pytest.mark.model
@pytest.mark.parametrize("name", broken_models())
def test_a_core_with_a_broken_model_file_names_it_and_fails(broken_model, name):
    path = broken_model(name)
    line = only_line(headrace("core", "--model", path, "--port", free_port("127.0.0.1")))
    assert line.startswith("headrace core: ")
    assert str(path) in line
    path.unlink()


def test_a_core_without_a_model_names_it_and_fails(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"0123")
    for model in (tmp_path / "none.gguf", tmp_path / "none", tmp_path / "empty", tmp_path / "weights.bin"):
        line = only_line(headrace("core", "--model", model, "--port", free_port("127.0.0.1")))
        assert line.startswith("headrace core: ")
        assert str(model) in line


@pytest.mark.parametrize(
    "config",
    ["{", "[]", "{}", '{"model_type": "mamba"}', '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'],
    ids=["no-json", "no-object", "no-architecture", "unknown-architecture", "no-sizes"],
)
def test_a_core_with_a_broken_configuration_names_it_and_fails(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"")
    line = only_line(headrace("core", "--model", tmp_path, "--port", free_port("127.0.0.1")))
    assert line.startswith("headrace core: ")
    assert str(tmp_path) in line


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.model
@pytest.mark.parametrize(
    "weights",
    [b"", b"garbage" * 100, struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2**40) + b"{}"],
    ids=["empty", "garbage", "no-tensors", "absurd-header"],
)
def test_a_core_with_broken_weights_names_them_and_fails(tmp_path, weights):
    for name, contents in load_tokenizer_files(resolve_model("demo").path).files.items():
        (tmp_path / name).write_bytes(contents)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "model.safetensors").write_bytes(weights)
    line = only_line(headrace("core", "--model", tmp_path, "--port", free_port("127.0.0.1")))
    assert line.startswith("headrace core: ")
    assert str(tmp_path) in line


def test_a_gateway_with_a_broken_tokenizer_names_it_and_fails(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    for path, named in ((tmp_path / "none", str(tmp_path / "none")), (tmp_path, "tokenizer.json")):
        words = ("--core", "127.0.0.1:1", "--port", free_port("127.0.0.1"), "--tokenizer", path)
        line = only_line(headrace("gateway", *words))
        assert line.startswith("headrace gateway: ")
        assert named in line


@pytest.mark.model
def test_a_taken_port_is_named(pair):
    """For either service, and before a core spends time on loading."""
    for taken in (pair.core.port, pair.gateway.port):
        for service, words in (("core", ("--model", "demo")), ("gateway", ("--core", "127.0.0.1:1"))):
            line = only_line(headrace(service, *words, "--port", taken))
            assert line.startswith(f"headrace {service}: ")
            assert str(taken) in line
    line = only_line(headrace("up", "--model", "demo", "--port", pair.gateway.port))
    assert str(pair.gateway.port) in line
    line = only_line(headrace("up", "--model", "demo", "--port", free_port("127.0.0.1"), "--core-port", pair.core.port))
    assert str(pair.core.port) in line


@pytest.mark.model
def test_up_with_a_broken_model_says_why_and_stops_the_gateway_too(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(gguf())
    result = headrace("up", "--model", path, "--port", free_port("127.0.0.1"))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    said = [line for line in result.stderr.splitlines() if not is_log_line(line)]
    assert any(line.startswith("headrace core: ") and str(path) in line for line in said)
    assert said[-1].startswith("headrace up: the core ended with exit code 1")


def test_a_gateway_whose_core_is_out_of_reach_lives_and_says_so(start_process):
    gateway = start_process("gateway", "--core", f"127.0.0.1:{free_port('127.0.0.1')}")
    gateway.wait_serving("liveness")
    server = ("--server", gateway.address)

    result = headrace("health", *server)
    assert result.returncode == 1
    assert result.stdout.startswith(f"NOT_SERVING {gateway.address}\n")
    assert "CONNECTING" in result.stdout
    assert headrace("health", *server, "--service", "liveness").returncode == 0

    line = only_line(headrace("generate", *server, "--text", "hello"))
    assert line.startswith("headrace generate: no core")
    error = json.loads(only_line(headrace("generate", *server, "--text", "hello", "--json")))["error"]
    assert (error["code"], error["violations"]) == ("UNAVAILABLE", [])

    assert gateway.stop() == 0
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    lost = [line for line in lines if line["event"] == "waiting for the core"]
    assert len(lost) == 1  # one for each new reason, not one for each attempt
    assert "Traceback" not in gateway.log.read_text()


def test_clients_of_nobody_say_so():
    server = f"127.0.0.1:{free_port('127.0.0.1')}"
    health = headrace("health", "--server", server)
    assert health.returncode == 1
    assert health.stdout.startswith(f"UNREACHABLE {server}")
    assert len(health.stdout.splitlines()) == 1
    for words in (("generate", "--text", "hello"), ("tokenize", "--text", "hello"), ("bench", "serve")):
        assert "connection refused" in only_line(headrace(*words, "--server", server))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("core",), "--model"),
        (("core", "--model", "demo", "--dtype", "float8"), "float8"),
        (("core", "--model", "demo", "--kv-cache-memory", "lots"), "lots"),
        (("core", "--model", "demo", "--port", "99999", "--max-num-seqs", "0"), "--port"),
        (("core", "--model", "demo", "--device", "cuda"), "cuda"),
        (("gateway",), "--core"),
        (("gateway", "--core", "nowhere"), "nowhere"),
        (("up", "--model", "demo", "--max-model-len", "-1", "--drain-grace", "soon"), "--max-model-len"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(words, said):
    line = only_line(headrace(*words))
    assert line.startswith(f"headrace {words[0]}: ")
    assert said in line


def test_every_wrong_setting_is_named_in_the_same_line():
    line = only_line(headrace("core", "--port", "99999", "--dtype", "int4", "--block-size", "17", HEADRACE_MODEL="x"))
    assert all(flag in line for flag in ("--port", "--dtype", "--block-size"))


@pytest.mark.parametrize(
    "words",
    [
        ("core", "--model", "demo", "--no-such-flag"),
        ("generate", "--server", "nowhere", "--text", "hello"),
        ("generate", "--text", "hello", "--max-tokens", "many"),
        ("generate", "--text", "hello", "--token-ids", "1"),
        ("frobnicate",),
        (),
    ],
)
def test_wrong_usage_ends_with_a_line_that_names_it(words):
    result = headrace(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("headrace")
    assert "error: " in result.stderr.splitlines()[-1]


@pytest.mark.model
def test_a_core_that_is_told_to_stop_while_it_loads_stops(start_process):
    core = start_process("core", "--model", "demo")
    core.wait_serving("liveness")
    started = time.monotonic()
    assert core.stop() == 0
    assert time.monotonic() - started < 30
    assert "Traceback" not in core.log.read_text()


@pytest.mark.model
def test_a_file_that_is_not_the_demo_model_is_not_served_as_such(tmp_path):
    other = tmp_path / "other.gguf"
    shutil.copy(__file__, other)
    result = headrace("core", "--model", "demo", "--port", free_port("127.0.0.1"), HEADRACE_DEMO_MODEL=str(other))
    assert str(other) in only_line(result)
