"""The files that define a model's tokenizer and chat template, and the facts that they hold.

They come from a Hugging Face directory, from a GGUF file's own metadata, or over the wire from a core. All three give
the same record, since a GGUF file's metadata are first written out as the files that they stand for.

    tokenizer.json            vocabulary, merges, pre-tokenizer, special tokens (needed)
    tokenizer_config.json     names of the special tokens, sometimes the chat template
    special_tokens_map.json   names of the special tokens, in older models
    chat_template.jinja       the chat template, in newer models
    generation_config.json    ids that end a generation
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.common.errors import StartupError
from headrace.common.gguf_metadata import is_gguf, read_gguf_metadata
from headrace.common.gguf_tokenizer import tokenizer_files_from_gguf
from headrace.common.tokenizer_digest import tokenizer_digest

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_FILES = 32
MAX_TOTAL_BYTES = 200 * 2**20

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """File name to contents; build it with `load_tokenizer_files` or `from_files`, which check it.

    The facts are read once, on first use, and raise StartupError if a file does not hold what it should.
    """

    files: Mapping[str, bytes]

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "TokenizerFiles":
        """Takes files that another process sent; StartupError names what is wrong with them."""
        check_file_names(files)
        total = sum(len(data) for data in files.values())
        if total > MAX_TOTAL_BYTES:
            raise StartupError(f"the tokenizer's files have {total} bytes; at most {MAX_TOTAL_BYTES} are taken")
        if "tokenizer.json" not in files:
            raise StartupError(f"the tokenizer's files lack tokenizer.json; there are {', '.join(files) or 'none'}")
        return cls(dict(files))

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, empty if there is none."""
        return self._json("tokenizer_config.json")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Text of each named special token: bos_token, eos_token, unk_token, ... as chat templates see them."""
        named = {**self._json("special_tokens_map.json"), **self.tokenizer_config}
        texts: dict[str, str] = {}
        for name in _SPECIAL_TOKEN_NAMES:
            token = named.get(name)
            # An added token is written as an object with its flags.
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
        return texts

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the tokenizer's end-of-sequence token, then those of generation_config.json."""
        listed = self._json("generation_config.json").get("eos_token_id")
        ids = listed if isinstance(listed, list) else [listed]
        if self.eos_token is not None:
            ids = [self.build_tokenizer().token_to_id(self.eos_token), *ids]
        return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Template text by name; "default" is the model's template. Empty if the model has none."""
        if "chat_template.jinja" in self.files:
            return {"default": self._text("chat_template.jinja")}
        listed = self.tokenizer_config.get("chat_template")
        if isinstance(listed, str):
            return {"default": listed}
        if isinstance(listed, list):
            try:
                return {entry["name"]: entry["template"] for entry in listed}
            except (KeyError, TypeError) as error:
                raise StartupError("tokenizer_config.json: chat_template must list names and templates") from error
        return {}

    @property
    def chat_template(self) -> str:
        """The model's chat template, empty if there is none."""
        return self.chat_templates.get("default", "")

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the tokenizer in hex: see `tokenizer_digest`. Takes about 0.2 s for 49,152 tokens."""
        return tokenizer_digest(self.build_tokenizer())

    @property
    def template_digest(self) -> str:
        """SHA-256 of the chat template's text in hex, empty if there is none."""
        return hashlib.sha256(self.chat_template.encode()).hexdigest() if self.chat_template else ""

    def build_tokenizer(self) -> Tokenizer:
        """A new tokenizer that neither truncates nor pads; StartupError if tokenizer.json is not valid."""
        # Read by the library at its first batch: one request must not take every core of the machine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            tokenizer = Tokenizer.from_buffer(self.files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"tokenizer.json is not a valid tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _text(self, name: str) -> str:
        try:
            return self.files[name].decode()
        except UnicodeDecodeError as error:
            raise StartupError(f"{name} is not valid UTF-8: {error}") from error

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            return {}
        try:
            value = json.loads(self._text(name))
        except ValueError as error:
            raise StartupError(f"{name} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise StartupError(f"{name} must hold a JSON object")
        return value


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """The tokenizer of a model, a GGUF file or a Hugging Face directory; StartupError says what is missing."""
    if path.is_dir():
        return TokenizerFiles.from_files(_read_directory(path))
    if is_gguf(path):
        return TokenizerFiles.from_files(tokenizer_files_from_gguf(read_gguf_metadata(path)))
    raise StartupError(f"{path} is neither a GGUF file nor a directory, so there is no tokenizer to load")


def check_file_names(names: Collection[str]) -> None:
    """StartupError if there are too many files or one of them is not a plain name."""
    if len(names) > MAX_FILES:
        raise StartupError(f"the tokenizer has {len(names)} files; at most {MAX_FILES} are taken")
    for name in names:
        if not name or name in (".", "..") or any(character in name for character in "/\\\0"):
            raise StartupError(f"the tokenizer's file name {name!r} is not a plain file name")


def _read_directory(path: Path) -> dict[str, bytes]:
    try:
        files = {name: (path / name).read_bytes() for name in FILE_NAMES if (path / name).is_file()}
    except OSError as error:
        raise StartupError(f"cannot read the tokenizer in {path}: {error}") from error
    if "tokenizer.json" not in files:
        raise StartupError(f"{path} has no tokenizer.json (a tokenizer.model alone is not supported)")
    return files
