"""Tokenizer files from a directory, a GGUF file and the wire."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from headrace.common.byte_tokenizer import byte_tokenizer_files
from headrace.common.errors import StartupError
from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import MAX_FILES, TokenizerFiles, load_tokenizer_files

DATA = Path(__file__).parents[1] / "data"


def write_directory(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def with_config(**config: Any) -> TokenizerFiles:
    files = dict(byte_tokenizer_files().files)
    return TokenizerFiles.from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})


def changed_tokenizer(change: Callable[[Library], Any]) -> TokenizerFiles:
    files = dict(byte_tokenizer_files().files)
    tokenizer = Library.from_buffer(files["tokenizer.json"])
    change(tokenizer)
    return TokenizerFiles.from_files(files | {"tokenizer.json": tokenizer.to_str().encode()})


def test_a_directory_gives_its_tokenizer_files_and_no_others(tmp_path: Path) -> None:
    expected = byte_tokenizer_files("{{ messages }}")
    write_directory(tmp_path, {**expected.files, "model.safetensors": b"x", "config.json": b"{}"})
    assert load_tokenizer_files(tmp_path) == expected


def test_what_travels_equals_what_was_loaded() -> None:
    files = byte_tokenizer_files("{{ messages }}")
    arrived = TokenizerFiles.from_files({name: bytes(data) for name, data in files.files.items()})
    assert arrived == files
    assert (arrived.digest, arrived.template_digest) == (files.digest, files.template_digest)


@pytest.mark.parametrize("name", ["../tokenizer.json", "a/b", "a\\b", "", "..", "a\0"])
def test_file_names_with_a_path_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="not a plain file name"):
        TokenizerFiles.from_files({**byte_tokenizer_files().files, name: b""})


def test_too_many_or_too_large_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(byte_tokenizer_files().files)
    with pytest.raises(StartupError, match=f"at most {MAX_FILES}"):
        TokenizerFiles.from_files(files | {f"{n}.json": b"" for n in range(MAX_FILES)})
    monkeypatch.setattr("headrace.common.tokenizer_files.MAX_TOTAL_BYTES", 1000)
    with pytest.raises(StartupError, match="at most 1000"):
        TokenizerFiles.from_files(files)


def test_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_tokenizer_files(tmp_path)
    with pytest.raises(StartupError, match=r"lack tokenizer\.json"):
        TokenizerFiles.from_files({"chat_template.jinja": b""})
    with pytest.raises(StartupError, match="neither a GGUF file nor a directory"):
        load_tokenizer_files(tmp_path / "none")


def test_corrupt_files_are_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a valid tokenizer"):
        _ = TokenizerFiles.from_files({"tokenizer.json": b"{}"}).digest
    files = dict(byte_tokenizer_files().files)
    for broken in (b"{", b"[]", b"\xff"):
        with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
            _ = TokenizerFiles.from_files(files | {"tokenizer_config.json": broken}).special_tokens


def test_special_tokens_may_be_texts_or_objects_with_flags() -> None:
    files = with_config(bos_token="<s>", eos_token={"content": "<eos>", "lstrip": False}, pad_token=None, other="x")
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "<eos>"}
    older = dict(byte_tokenizer_files().files)
    del older["tokenizer_config.json"]
    older["special_tokens_map.json"] = b'{"eos_token": "<eos>"}'
    assert TokenizerFiles.from_files(older).eos_token == "<eos>"


@pytest.mark.parametrize(("listed", "expected"), [(None, (257,)), (10, (257, 10)), ([10, 257, 11], (257, 10, 11))])
def test_the_tokenizers_end_token_is_the_primary_one(listed: Any, expected: Any) -> None:
    files = dict(byte_tokenizer_files().files)
    files["generation_config.json"] = json.dumps({"eos_token_id": listed}).encode()
    assert TokenizerFiles.from_files(files).eos_token_ids == expected


def test_the_template_comes_from_its_own_file_or_the_config() -> None:
    assert with_config(chat_template="a").chat_template == "a"
    named = with_config(chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    assert (named.chat_template, named.chat_templates["tool_use"]) == ("d", "t")
    both = TokenizerFiles.from_files({**with_config(chat_template="a").files, "chat_template.jinja": b"b"})
    assert both.chat_template == "b"
    with pytest.raises(StartupError, match="chat_template"):
        _ = with_config(chat_template=["a"]).chat_template


def test_the_template_digest_is_of_its_text() -> None:
    assert with_config(chat_template="é").template_digest == hashlib.sha256("é".encode()).hexdigest()
    assert with_config().template_digest == ""


def test_the_digest_depends_on_meaning_not_on_bytes() -> None:
    plain = byte_tokenizer_files()
    spaced = json.dumps(json.loads(plain.files["tokenizer.json"]), indent=3).encode()
    assert TokenizerFiles.from_files({"tokenizer.json": spaced}).digest == plain.digest
    assert changed_tokenizer(lambda t: t.enable_truncation(1)).digest == plain.digest
    assert byte_tokenizer_files(merges=[(b"a", b"a")]).digest != plain.digest


def prefix_space(tokenizer: Library) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize(
    "change", [prefix_space, lambda t: t.add_special_tokens(["a"]), lambda t: t.add_tokens(["zz"])]
)
def test_the_digest_sees_encodings_flags_and_new_tokens(change: Callable[[Library], Any]) -> None:
    assert changed_tokenizer(change).digest != byte_tokenizer_files().digest


@pytest.fixture(scope="module")
def demo_files() -> TokenizerFiles:
    return load_tokenizer_files(resolve_model("demo").path)


@pytest.mark.model
def test_demo_texts_give_the_reference_ids(demo_files: TokenizerFiles) -> None:
    tokenizer = demo_files.build_tokenizer()
    for name in ("strings", "greedy"):
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            if "text" in case:
                expected = case.get("token_ids") or case["prompt_token_ids"]
                assert tokenizer.encode(case["text"]).ids == expected, case["text"]


@pytest.mark.model
def test_demo_facts(demo_files: TokenizerFiles) -> None:
    assert demo_files.eos_token_ids == (2,)
    assert (demo_files.bos_token, demo_files.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "SmolLM" in demo_files.chat_template
    assert load_tokenizer_files(resolve_model("demo").path).digest == demo_files.digest
