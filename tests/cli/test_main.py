"""The command itself: exit codes, one clear line, cheap start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import COMMANDS, main


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=120,
        check=False,
    )


def test_version_and_help_exit_with_0():
    assert run("--version").stdout == f"headrace {headrace.__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: headrace {command}")


def test_no_command_imports_torch_or_transformers_before_it_needs_them():
    modules = ", ".join(f"headrace.cli.{command}" for command in COMMANDS)
    heavy = ("torch", "transformers", "tokenizers", "huggingface_hub", "yaml")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("core", "--model", "demo", "--max-num-seqs", "0", "--dtype", "int3"), "--max-num-seqs"),
        (("core", "--model", "/no/such/file.gguf"), "/no/such/file.gguf"),
        (("core",), "--model is required"),
        (("gateway",), "--core is required"),
        (("gateway", "--core", "localhost"), "host:port"),
        (("up", "--model", "demo", "--port", "x", "--core-port", "70000", "--block-size", "3"), "--core-port"),
    ],
)
def test_what_cannot_start_says_so_in_one_line_and_exits_with_1(words, said):
    ended = run(*words)
    assert ended.returncode == 1
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]  # JSON lines are logs
    assert len(lines) == 1
    assert lines[0].startswith(f"headrace {words[0]}: ")
    assert said in lines[0]


def test_up_names_the_wrong_settings_of_both_sides_in_one_message():
    ended = run("up", "--model", "demo", "--block-size", "3", "--tokenizer-threads", "0", HEADRACE_COLOUR="blue")
    for name in ("--block-size", "--tokenizer-threads", "HEADRACE_COLOUR"):
        assert ended.stderr.count(name) == 1
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--port", "--core-port"])
def test_up_with_a_taken_port_says_so_in_one_line_and_starts_nothing(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("up", "--model", "demo", "--port", "0", "--core-port", "0", flag, str(port))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is taken; choose another with {flag}, 0 is any free one" in ended.stderr


@pytest.mark.parametrize("words", [("core", "--model", "demo"), ("gateway", "--core", "127.0.0.1:9")])
def test_a_service_with_a_taken_port_says_how_to_choose_another(words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = run(*words, "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "is taken; choose another with --port, 0 is any free one" in ended.stderr


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (["generate", "--modle", "demo"], "headrace generate", "unknown flag --modle (did you mean --model?)"),
        (["bench", "serve", "--requets=3"], "headrace bench serve", "--requets (did you mean --requests?)"),
        (["chat", "--qqqq"], "headrace chat", "unknown flag --qqqq\n"),
        (["tokenize", "hello", "--text", "a"], "headrace tokenize", "unexpected: hello"),
        (["health", "-x"], "headrace health", "unexpected: -x"),
    ],
)
def test_unknown_words_are_answered_with_the_usage_of_the_subcommand(words, usage, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {usage} ")
    assert said in shown


def test_up_with_both_on_one_port_is_refused():
    ended = run("up", "--model", "demo", "--port", "50099", "--core-port", "50099")
    assert ended.returncode == 1
    assert "own address" in ended.stderr


def test_output_to_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m headrace doctor | head -c 1 > /dev/null"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in ended.stderr


def test_a_gateway_without_the_core_installed_has_its_commands_and_says_what_it_lacks(tmp_path):
    package = tmp_path / "headrace"
    package.mkdir()
    for entry in Path(headrace.__file__).parent.iterdir():
        if entry.name not in ("core_service", "kernels", "__pycache__"):
            (package / entry.name).symlink_to(entry.resolve())
    for words in (("gateway", "--help"), ("generate", "--help"), ("doctor",)):
        ended = run(*words, PYTHONPATH=str(tmp_path))
        assert ended.returncode == 0, ended.stderr
    assert "(core)" not in ended.stdout
    for command in ("core", "up"):
        ended = run(command, "--model", "demo", PYTHONPATH=str(tmp_path))
        assert (ended.returncode, ended.stderr) == (1, f"headrace {command}: this installation holds no core_service\n")
