"""chat, tokenize, health, bench and doctor."""

import io
import json

import pytest
from grpc_health.v1 import health_pb2

from headrace.cli.main import main
from headrace.common.addresses import free_port


def test_tokenize_gives_ids_of_text_and_chat_and_text_of_ids(gateway, capsys, tmp_path):
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "x"}]')
    server = ["--server", gateway.address]
    for flags in (["--text", "one three"], ["--text", "one", "--no-special-tokens"], ["--chat-json", str(chat)]):
        assert main(["tokenize", *server, *flags]) == 0
    assert main(["tokenize", *server, "--ids", "4,5"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"token_ids": [0, 3, 5], "count": 3},
        {"token_ids": [3], "count": 1},
        {"token_ids": [7, 8], "count": 2, "rendered": "<chat>"},
        {"text": " w4 w5"},
    ]


def test_health_exits_0_exactly_when_serving_and_shows_the_cores(gateway, capsys):
    command = ["health", "--server", gateway.address]
    gateway.health.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("SERVING ")
    assert "core core:1 SERVING running=2 waiting=1 free_blocks=5/9" in shown
    gateway.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main(command) == 1
    assert capsys.readouterr().out.startswith("NOT_SERVING ")


def test_health_of_an_unknown_service_or_an_absent_server_is_1(gateway, capsys):
    assert main(["health", "--server", gateway.address, "--service", "no.such.Service"]) == 1
    assert main(["health", "--server", f"127.0.0.1:{free_port('127.0.0.1')}"]) == 1
    assert "UNREACHABLE" in capsys.readouterr().out


def test_health_refuses_an_address_that_is_none(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["health", "--server", "localhost"])
    assert stop.value.code == 2
    assert "must be host:port" in capsys.readouterr().err


def bench(gateway, *flags: str) -> int:
    return main(["bench", "serve", "--server", gateway.address, *flags])


def test_bench_reports_exactly_the_promised_keys(gateway, capsys):
    flags = ["--concurrency", "3", "--requests", "7", "--input-tokens", "5", "--output-tokens", "4", "--json"]
    assert bench(gateway, *flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"output_tok_s", "ttft_ms", "itl_ms", "requests", "failed"}
    assert (report["requests"], report["failed"]) == (7, 0)
    assert report["output_tok_s"] > 0
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"]
    assert 0 < report["itl_ms"]["p50"] <= report["itl_ms"]["p99"]


def test_bench_sends_different_prompts_of_the_length_asked_for_after_a_warm_up(gateway, capsys):
    bench(gateway, "--requests", "20", "--input-tokens", "6", "--output-tokens", "2", "--json")
    prompts = [tuple(request.prompt.token_ids.ids) for request in gateway.requests]
    assert len(prompts) == 21
    assert len({prompt[0] for prompt in prompts}) == 21
    assert all(len(prompt) == 6 for prompt in prompts)
    assert all(request.sampling.ignore_eos and request.sampling.max_tokens == 2 for request in gateway.requests)
    assert all(
        request.sampling.HasField("temperature") and request.sampling.temperature == 0 for request in gateway.requests
    )


def test_bench_that_cannot_run_fails_in_the_json_form(gateway, capsys):
    assert bench(gateway, "--model", "none", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["error"]["code"] == "NOT_FOUND"


def test_bench_counts_failures(gateway, capsys, monkeypatch):
    answered = []

    def fail_later(request, context):
        answered.append(request)
        return [666] if len(answered) > 3 else [1]

    monkeypatch.setattr(gateway, "_prompt_ids", fail_later)
    assert bench(gateway, "--requests", "6", "--concurrency", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["failed"]) == (6, 4)


def test_chat_keeps_the_history_and_ends_with_its_input(gateway, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd then?\n/exit\nnever sent\n"))
    assert main(["chat", "--server", gateway.address, "--system", "Be brief.", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == " w2 w3\n w4 w5\n"
    last = [(message.role, message.content) for message in gateway.requests[-1].prompt.chat.messages]
    assert last == [("system", "Be brief."), ("user", "Hello"), ("assistant", " w2 w3"), ("user", "And then?")]
    assert len(gateway.requests) == 2


def test_chat_forgets_a_turn_that_was_refused(gateway, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("too long\nshort\n"))
    assert main(["chat", "--server", gateway.address]) == 0
    assert "refused: prompt: too long" in capsys.readouterr().err
    assert [message.content for message in gateway.requests[-1].prompt.chat.messages] == ["short"]


def test_chat_ends_with_1_when_the_server_is_gone(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", "--server", f"127.0.0.1:{free_port('127.0.0.1')}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_doctor_names_versions_devices_ports_and_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for part in ("headrace 0.", "grpcio", "cpu:", "(gateway)", "(core)", str(tmp_path), "not fetched yet"):
        assert part in shown


def test_doctor_fails_when_something_needed_is_missing(capsys, monkeypatch):
    def version(name: str) -> str:
        if name == "protobuf":
            raise importlib_metadata.PackageNotFoundError(name)
        return "1.0"

    from importlib import metadata as importlib_metadata

    monkeypatch.setattr("headrace.cli.doctor.importlib.metadata.version", version)
    assert main(["doctor"]) == 1
    assert "missing: protobuf" in capsys.readouterr().out


def test_health_of_an_unknown_service_names_it_and_the_server(gateway, capsys):
    main(["health", "--server", gateway.address, "--service", "nosuch"])
    assert capsys.readouterr().out == f"NOT_FOUND {gateway.address}: it has no service nosuch\n"


@pytest.mark.parametrize("command", [["chat"], ["generate", "--text", "a"], ["bench", "serve"]])
def test_an_absent_server_is_told_in_one_line_even_without_input(capsys, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    server = f"127.0.0.1:{free_port('127.0.0.1')}"
    assert main([*command, "--server", server]) == 1
    assert capsys.readouterr().err == (
        f"headrace {command[0]}: cannot reach {server}: connection refused; is a gateway running there? "
        "(`headrace up --model demo` starts one)\n"
    )


def test_chat_answers_unknown_commands_itself_but_not_sentences_that_begin_with_a_slash(gateway, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n/usr/bin is what?\n"))
    assert main(["chat", "--server", gateway.address]) == 0
    assert capsys.readouterr().err == "/exit ends; unknown command /quit\n"
    assert [message.content for message in gateway.requests[0].prompt.chat.messages] == ["/usr/bin is what?"]


def test_chat_has_no_flags_that_change_nothing(capsys):
    for flag in ("--n", "--logprobs", "--prompt-logprobs"):
        with pytest.raises(SystemExit):
            main(["chat", flag, "1"])


def test_a_variable_with_a_typing_error_is_a_warning_and_no_failure(gateway, capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_SERVR", "x:1")
    assert main(["tokenize", "--server", gateway.address, "--text", "a"]) == 0
    said = capsys.readouterr().err
    assert said == "headrace tokenize: unknown variable HEADRACE_SERVR (did you mean HEADRACE_SERVER?)\n"
