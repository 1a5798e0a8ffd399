"""The command lines that scripts rely on, against the running pair."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.main import COMMANDS
from headrace.common.addresses import Address, free_port, is_port_taken

CASES = [json.loads(line) for line in Path("tests/data/greedy.jsonl").read_text().splitlines()]
TEXT_CASE = next(case for case in CASES if case["kind"] == "text")
CHAT_CASE = next(case for case in CASES if case["kind"] == "chat")
TIMEOUT_S = 200

pytestmark = pytest.mark.model


def headrace(*words: object, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs the command as it is installed."""
    command = [str(Path(sys.executable).with_name("headrace")), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == code, result.stderr
    return result


def answer(*words: object):
    """The one JSON object on stdout of a command that succeeds."""
    result = headrace(*words)
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def generate(pair, *words: object):
    return answer("generate", "--server", pair.server, *words, "--json")


def check_shape(result, *, n: int = 1):
    assert list(result) == ["outputs", "prompt_logprobs", "usage"]
    assert list(result["usage"]) == ["prompt_tokens", "cached_tokens", "output_tokens"]
    assert [output["index"] for output in result["outputs"]] == list(range(n))
    for output in result["outputs"]:
        assert list(output) == ["index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs"]


def test_generate_from_text_token_ids_and_chat(pair, tmp_path):
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(CHAT_CASE["messages"]))
    ids = ",".join(map(str, TEXT_CASE["prompt_token_ids"]))
    for case, prompt in (
        (TEXT_CASE, ("--text", TEXT_CASE["text"])),
        (TEXT_CASE, ("--token-ids", ids)),
        (CHAT_CASE, ("--chat-json", chat)),
    ):
        result = generate(pair, *prompt, "--max-tokens", 6, "--temperature", 0)
        check_shape(result)
        (output,) = result["outputs"]
        assert output["token_ids"] == case["output_token_ids"][:6]
        assert case["output_text"].startswith(output["text"])
        assert (output["finish_reason"], output["stop_reason"], output["logprobs"]) == ("length", None, None)
        assert result["prompt_logprobs"] is None
        assert result["usage"]["prompt_tokens"] == len(case["prompt_token_ids"])
        assert result["usage"]["output_tokens"] == 6


def test_generate_with_log_probabilities(pair):
    prompt = ("--text", TEXT_CASE["text"], "--max-tokens", 2, "--temperature", 0)
    result = generate(pair, *prompt, "--logprobs", 2, "--prompt-logprobs", 1)
    (output,) = result["outputs"]
    assert [row[0]["token_id"] for row in output["logprobs"]] == output["token_ids"]
    for row in output["logprobs"]:
        assert 2 <= len(row) <= 3
        assert all(list(candidate) == ["token_id", "token", "logprob", "rank"] for candidate in row)
    prompt_ids = TEXT_CASE["prompt_token_ids"]
    assert result["prompt_logprobs"][0] is None
    assert [row[0]["token_id"] for row in result["prompt_logprobs"][1:]] == prompt_ids[1:]


def test_generate_with_seed_and_several_completions(pair):
    words = ("--text", "Once upon a time", "--max-tokens", 8, "--temperature", 0.8, "--n", 3, "--ignore-eos")
    first, again = (generate(pair, *words, "--seed", 11) for _ in range(2))
    other = generate(pair, *words, "--seed", 12)
    check_shape(first, n=3)
    assert first["outputs"] == again["outputs"] != other["outputs"]
    # Completion i draws with seed + i.
    assert other["outputs"][0]["token_ids"] == first["outputs"][1]["token_ids"]
    assert first["usage"]["output_tokens"] == 24


def test_generate_with_stop_strings(pair):
    words = ("--text", "The capital of France is", "--max-tokens", 40, "--temperature", 0)
    free = generate(pair, *words, "--ignore-eos")["outputs"][0]
    assert len(free["token_ids"]) == 40
    stop = free["text"].split()[1]
    stopped = generate(pair, *words, "--stop", "-- never --", "--stop", stop)["outputs"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["text"] == free["text"][: free["text"].index(stop)]


def test_a_failed_generate_prints_the_error_and_its_violations(pair):
    words = ("--server", pair.server, "--text", "", "--max-tokens", 1, "--temperature", 5)
    result = headrace("generate", *words, "--json", code=1)
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert list(error) == ["code", "message", "violations"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert {violation["field"] for violation in error["violations"]} == {"prompt.text", "sampling.temperature"}
    assert all(violation["description"] for violation in error["violations"])
    line = headrace("generate", *words, code=1).stderr
    assert line.startswith("headrace generate: ")
    assert len(line.splitlines()) == 1


def test_generate_without_json_prints_the_text(pair):
    words = ("generate", "--server", pair.server, "--text", TEXT_CASE["text"], "--max-tokens", 6, "--temperature", 0)
    expected = generate(pair, *words[3:])["outputs"][0]["text"]
    assert headrace(*words).stdout == expected + "\n"


def test_tokenize_both_ways(pair):
    text = "naïve café 👍"
    ids = answer("tokenize", "--server", pair.server, "--text", text)["token_ids"]
    assert answer("tokenize", "--server", pair.server, "--ids", ",".join(map(str, ids)))["text"] == text


def test_health_of_gateway_and_core(pair):
    lines = headrace("health", "--server", pair.server).stdout.splitlines()
    assert lines[0] == f"SERVING {pair.server}"
    assert lines[1].split()[:3] == ["core", pair.core.address, "SERVING"]
    assert headrace("health", "--server", pair.core.address).stdout == f"SERVING {pair.core.address}\n"
    assert headrace("health", "--server", pair.server, "--service", "no.such.Service", code=1)


def test_bench_serve_reports_what_scripts_read(pair):
    words = ("--concurrency", 4, "--requests", 6, "--input-tokens", 12, "--output-tokens", 5)
    report = answer("bench", "serve", "--server", pair.server, *words, "--json")
    assert list(report) == ["output_tok_s", "ttft_ms", "itl_ms", "requests", "failed"]
    assert (report["requests"], report["failed"]) == (6, 0)
    assert report["output_tok_s"] > 0
    for latency in (report["ttft_ms"], report["itl_ms"]):
        assert list(latency) == ["p50", "p99"]
        assert 0 < latency["p50"] <= latency["p99"]


def test_chat_streams_answers_and_ends_with_its_input(pair):
    command = [sys.executable, "-m", "headrace", "chat", "--server", pair.server, "--max-tokens", "12"]
    result = subprocess.run(command, input="Say hello.\n", capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert result.stdout.strip()


def test_doctor_tells_versions_and_finds_the_demo_model():
    output = headrace("doctor").stdout
    assert "headrace" in output
    assert "torch" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    assert f"headrace {command}" in headrace(command, "--help").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_when_it_is_ready_and_drains_when_told(number):
    ports = free_port("127.0.0.1"), free_port("127.0.0.1")
    server = f"127.0.0.1:{ports[0]}"
    flags = ["--kv-cache-memory", "64MiB", "--max-model-len", "512", "--max-num-seqs", "8"]
    flags += ["--max-num-batched-tokens", "256", "--dtype", "bfloat16", "--log-level", "error"]
    command = [sys.executable, "-m", "headrace", "up", "--model", "demo", "--port", str(ports[0])]
    process = subprocess.Popen(
        [*command, "--core-port", str(ports[1]), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready ")
        assert server in line
        assert f"127.0.0.1:{ports[1]}" in line
        with grpc.insecure_channel(server) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        # What is in flight is finished before both end.
        words = ["generate", "--server", server, "--text", "The sea is", "--max-tokens", "60", "--ignore-eos"]
        with subprocess.Popen(
            [sys.executable, "-m", "headrace", *words, "--temperature", "0"], stdout=subprocess.PIPE
        ) as client:
            assert client.stdout is not None
            assert client.stdout.read(1)
            process.send_signal(number)
            rest = client.stdout.read()
        assert client.returncode == 0
        assert len(rest.split()) > 20
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, stdout, stderr) == (0, "", "")
        assert not any(is_port_taken(Address("127.0.0.1", port)) for port in ports)
    finally:
        process.kill()
        process.communicate()
