import io
import json
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.common.addresses import free_port
from headrace.gateway_api.v1 import generation_pb2 as pb


def generate(gateway, *flags: str) -> int:
    return main(["generate", "--server", gateway.address, *flags])


def result(capsys) -> Any:
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_json_has_exactly_the_promised_shape(gateway, capsys):
    assert generate(gateway, "--text", "a b c", "--max-tokens", "2", "--temperature", "0", "--json") == 0
    assert result(capsys) == {
        "outputs": [
            {
                "index": 0,
                "text": " w3 w4",
                "token_ids": [3, 4],
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": None,
            }
        ],
        "prompt_logprobs": None,
        "usage": {"prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 2},
    }


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_json_is_the_same_for_every_output_kind(gateway, capsys, kind):
    flags = ["--text", "a b", "--n", "3", "--max-tokens", "4", "--logprobs", "1", "--json"]
    generate(gateway, *flags)
    expected = result(capsys)
    generate(gateway, *flags, "--output-kind", kind)
    assert result(capsys) == expected
    assert [output["token_ids"] for output in expected["outputs"]] == [[2, 3, 4, 5], [12, 13, 14, 15], [22, 23, 24, 25]]
    assert all(len(output["logprobs"]) == 4 for output in expected["outputs"])


def test_logprobs_list_the_sampled_token_first_and_null_for_the_first_prompt_position(gateway, capsys):
    flags = ["--token-ids", "5,6,7,8", "--max-tokens", "1", "--logprobs", "1", "--prompt-logprobs", "0", "--json"]
    assert generate(gateway, *flags) == 0
    answer = result(capsys)
    assert answer["outputs"][0]["logprobs"] == [
        [
            {"token_id": 4, "token": " w4", "logprob": -0.5, "rank": 1},
            {"token_id": 5, "token": " w5", "logprob": -1.5, "rank": 2},
        ]
    ]
    assert [row and row[0]["token_id"] for row in answer["prompt_logprobs"]] == [None, 6, 7, 8]


def test_stop_reason_is_an_id_or_a_text(gateway, capsys):
    generate(gateway, "--text", "a", "--stop-token-ids", "9,8", "--json")
    assert result(capsys)["outputs"][0]["stop_reason"] == 9
    generate(gateway, "--text", "a", "--stop", "end", "--json")
    answer = result(capsys)["outputs"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "end")


def test_text_is_printed_as_it_comes_without_json(gateway, capsys):
    assert generate(gateway, "--text", "a", "--max-tokens", "3", "--output-kind", "cumulative") == 0
    assert capsys.readouterr().out == " w1 w2 w3\n"


def test_several_completions_are_printed_one_after_the_other(gateway, capsys):
    assert generate(gateway, "--text", "a", "--max-tokens", "1", "--n", "2") == 0
    assert capsys.readouterr().out == "[0]  w1\n[1]  w11\n"


def test_flags_not_given_leave_their_fields_unset(gateway, capsys):
    generate(gateway, "--text", "a")
    sent = gateway.requests[0]
    assert sent.sampling.ListFields() == []
    assert sent.text_options.ListFields() == []


def test_every_flag_reaches_its_field(gateway, capsys):
    generate(
        gateway,
        *["--text", "a", "--max-tokens", "5", "--min-tokens", "2", "--temperature", "0.5", "--top-k", "3"],
        *["--top-p", "0.5", "--min-p", "0.25", "--seed", "18446744073709551615", "--n", "2", "--logprobs", "1"],
        *["--prompt-logprobs", "2", "--stop", "x", "--stop", "y", "--stop-token-ids", "1,2", "--ignore-eos"],
        *["--priority", "-3", "--model", "fake", "--output-kind", "final", "--deadline", "30s"],
    )
    sent = gateway.requests[0]
    assert (sent.sampling.max_tokens, sent.sampling.min_tokens, sent.sampling.n) == (5, 2, 2)
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.min_p) == (0.5, 0.5, 0.25)
    assert (sent.sampling.top_k, sent.sampling.seed) == (3, 2**64 - 1)
    assert (sent.sampling.logprobs, sent.sampling.prompt_logprobs) == (1, 2)
    assert (list(sent.sampling.stop_token_ids), list(sent.text_options.stop)) == ([1, 2], ["x", "y"])
    assert sent.sampling.ignore_eos
    assert (sent.priority, sent.model, sent.output_kind) == (-3, "fake", pb.OUTPUT_KIND_FINAL_ONLY)


def test_zero_is_sent_and_not_taken_for_unset(gateway, capsys):
    generate(gateway, "--text", "a", "--max-tokens", "0", "--n", "0", "--temperature", "0", "--stop", "")
    sent = gateway.requests[0]
    assert sent.sampling.WhichOneof("limit") == "max_tokens"
    assert sent.sampling.HasField("n")
    assert sent.sampling.HasField("temperature")
    assert list(sent.text_options.stop) == [""]


def error_of(capsys) -> Any:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])["error"]


def test_a_refusal_names_code_and_every_violation_on_stderr(gateway, capsys):
    assert generate(gateway, "--text", "", "--temperature", "-1", "--json") == 1
    error = error_of(capsys)
    assert error["code"] == "INVALID_ARGUMENT"
    assert [violation["field"] for violation in error["violations"]] == ["sampling.temperature", "prompt"]
    assert all(violation["description"] for violation in error["violations"])


def test_numbers_that_no_field_can_hold_are_refused_in_the_same_form(gateway, capsys):
    assert generate(gateway, "--text", "a", "--n", "-1", "--max-tokens", "-1", "--json") == 1
    error = error_of(capsys)
    assert error["code"] == "INVALID_ARGUMENT"
    assert {violation["field"] for violation in error["violations"]} == {"sampling.n", "sampling.max_tokens"}
    assert generate(gateway, "--token-ids", "-1,2", "--json") == 1
    assert error_of(capsys)["violations"][0]["field"] == "prompt.token_ids"
    assert gateway.requests == []


def test_other_errors_have_no_violations(gateway, capsys):
    assert generate(gateway, "--text", "a", "--model", "none", "--json") == 1
    assert error_of(capsys) == {"code": "NOT_FOUND", "message": "no model none", "violations": []}


def test_a_stream_that_breaks_prints_no_json_on_stdout(gateway, capsys):
    assert generate(gateway, "--token-ids", "666", "--json") == 1
    assert error_of(capsys)["violations"][0]["description"] == "broke in mid-stream"


def test_an_unreachable_server_is_unavailable(capsys):
    server = f"127.0.0.1:{free_port('127.0.0.1')}"
    assert main(["generate", "--server", server, "--text", "a", "--json"]) == 1
    assert error_of(capsys)["code"] == "UNAVAILABLE"


def test_without_json_an_error_is_one_plain_line(gateway, capsys):
    assert generate(gateway, "--text", "") == 1
    assert capsys.readouterr().err == "headrace generate: prompt: must not be empty\n"


def test_chat_json_takes_a_list_or_an_object(gateway, capsys, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    plain, full = tmp_path / "plain.json", tmp_path / "full.json"
    plain.write_text(json.dumps(messages))
    tools = [{"type": "function", "function": {"name": "f"}}]
    full.write_text(json.dumps({"messages": messages, "tools": tools, "add_generation_prompt": False}))
    assert generate(gateway, "--chat-json", str(plain)) == 0
    assert generate(gateway, "--chat-json", str(full)) == 0
    first, second = (request.prompt.chat for request in gateway.requests)
    assert [(message.role, message.content) for message in first.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert not first.HasField("add_generation_prompt")
    assert [json.loads(tool) for tool in second.tools] == tools
    assert second.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    "content",
    ["{", "3", '{"messages": 3}', '[{"role": 3}]', '[{"role": "user", "colour": "x"}]', '{"massages": []}', '["x"]'],
)
def test_a_bad_chat_file_is_an_invalid_argument(gateway, capsys, tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_text(content)
    assert generate(gateway, "--chat-json", str(file), "--json") == 1
    error = error_of(capsys)
    assert (error["code"], error["violations"][0]["field"]) == ("INVALID_ARGUMENT", "prompt.chat")


def test_a_bad_chat_on_standard_input_says_what_is_wrong(gateway, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"messages": 3}'))
    assert generate(gateway, "--chat-json", "-") == 1
    assert "standard input: messages must be a list; got 3" in capsys.readouterr().err


def test_text_comes_from_a_file_or_from_standard_input(gateway, capsys, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_text("a b c d")
    generate(gateway, "--text-file", str(tmp_path / "prompt"))
    monkeypatch.setattr("sys.stdin", io.StringIO("a b"))
    generate(gateway, "--text-file", "-")
    assert [request.prompt.text for request in gateway.requests] == ["a b c d", "a b"]


@pytest.mark.parametrize("text", ["-x", "--json", "--x=1", "-1", "\udce4"])
def test_any_text_can_be_a_prompt_or_is_refused(gateway, capsys, text):
    code = generate(gateway, "--text", text, "--json")
    if text == "\udce4":  # what Python makes of an argument that is not UTF-8
        assert code == 1
        assert error_of(capsys)["violations"][0]["field"] == "prompt.text"
    else:
        assert code == 0
        assert gateway.requests[0].prompt.text == text


@pytest.mark.parametrize("flags", [[], ["--text", "a", "--token-ids", "1"], ["--text", "a", "--temperature", "warm"]])
def test_wrong_usage_exits_with_2(gateway, capsys, flags):
    with pytest.raises(SystemExit) as stop:
        generate(gateway, *flags)
    assert stop.value.code == 2
