"""Writes the tokenizer files that a GGUF file's metadata stand for.

`tokenizer.ggml.model` names the family and `tokenizer.ggml.pre` how a byte-level family cuts text into words:

    gpt2     byte-level BPE with a list of merges
    llama    SentencePiece BPE: the merges follow from the pieces' scores, unknown characters fall back to byte tokens

The patterns are those of the published tokenizer.json files of the models after which the variants are named.
"""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.common.errors import StartupError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2_PRE = ("gpt-2", "default")
_SMOLLM_PRE = ("smollm",)
_LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_PRE = ("qwen2", "deepseek-r1-qwen")
SUPPORTED_PRE_TOKENIZERS = _GPT2_PRE + _SMOLLM_PRE + _LLAMA3_PRE + _QWEN2_PRE

_SPECIAL_NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# Ids that end a generation too, besides the end-of-sequence token.
_MORE_END_IDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def tokenizer_files_from_gguf(metadata: dict[str, Any]) -> dict[str, bytes]:
    """File name to contents: tokenizer.json, tokenizer_config.json, generation_config.json, chat_template.jinja.

    Raises StartupError if the metadata lack a vocabulary, contradict themselves, or name an unknown family or variant.
    """
    tokens, types = _vocabulary(metadata)
    family = metadata.get("tokenizer.ggml.model")
    if family == "gpt2":
        tokenizer = _byte_level(tokens, types, metadata)
    elif family == "llama":
        tokenizer = _sentencepiece(tokens, types, metadata)
    else:
        raise StartupError(f"the GGUF file's tokenizer model is {family!r}; supported are 'gpt2' and 'llama'")
    _add_tokens(tokenizer, tokens, types)
    config: dict[str, Any] = {
        name: tokens[i] for name, key in _SPECIAL_NAMES.items() if (i := _token_id(metadata, key, tokens)) is not None
    }
    _add_post_processor(tokenizer, metadata, config)
    end_ids = [_token_id(metadata, key, tokens) for key in (_SPECIAL_NAMES["eos_token"], *_MORE_END_IDS)]
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(
            {"eos_token_id": list(dict.fromkeys(i for i in end_ids if i is not None))}
        ).encode(),
    }
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _vocabulary(metadata: dict[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise StartupError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or (_NORMAL,) * len(tokens)
    if len(types) != len(tokens):
        raise StartupError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    return tokens, types


def _vocab_of(tokens: tuple[str, ...], types: tuple[int, ...]) -> dict[str, int]:
    # Unused ids pad the embedding matrix: the model's own tokenizer does not have them either.
    return {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}


def _byte_level(tokens: tuple[str, ...], types: tuple[int, ...], metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SUPPORTED_PRE_TOKENIZERS:
        raise StartupError(
            f"the GGUF file's pre-tokenizer is {pre!r}; supported are {', '.join(SUPPORTED_PRE_TOKENIZERS)}"
        )
    merges = _merges(metadata)
    if merges is None:
        raise StartupError("the GGUF file has a byte-level vocabulary without merges (tokenizer.ggml.merges)")
    tokenizer = Tokenizer(models.BPE(vocab=_vocab_of(tokens, types), merges=merges, ignore_merges=pre in _LLAMA3_PRE))
    if pre in _QWEN2_PRE:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _byte_level_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2_PRE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SMOLLM_PRE:
        # Decimal digits only: number characters such as "½" and "²" stay with their words, as in the ids that Hugging
        # Face transformers gives for such a GGUF file (llama.cpp and the original tokenizer.json cut them off too).
        digits = pre_tokenizers.Split(Regex(r"\p{Nd}"), behavior="isolated")
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = _LLAMA3_WORDS if pre in _LLAMA3_PRE else _QWEN2_WORDS
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(tokens: tuple[str, ...], types: tuple[int, ...], metadata: dict[str, Any]) -> Tokenizer:
    vocab = _vocab_of(tokens, types)
    merges = _merges(metadata)
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise StartupError("the GGUF file has a SentencePiece vocabulary without a score for each token")
        # Only normal pieces are made by merging: typing "<s>" or "<0x0A>" must not give the control or byte token.
        merges = merges_from_scores({piece: i for piece, i in vocab.items() if types[i] == _NORMAL}, scores)
    unknown = _token_id(metadata, _SPECIAL_NAMES["unk_token"], tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks_spaces = normalizers.Replace(" ", "▁")
    from_bytes = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks_spaces])
        tokenizer.decoder = decoders.Sequence([*from_bytes, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = marks_spaces
        tokenizer.decoder = decoders.Sequence(from_bytes)
    return tokenizer


def merges_from_scores(vocab: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary: every way to make a piece from two others, best piece first.

    SentencePiece always joins the neighbours whose joined piece has the highest score; ways to make the same piece are
    ordered by the ids of their parts, as Hugging Face's converter does.
    """
    found = []
    for piece, token_id in vocab.items():
        ways = [
            (vocab[piece[:cut]], vocab[piece[cut:]])
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        found += [(-scores[token_id], token_id, *way) for way in ways]
    found.sort()
    text = {token_id: piece for piece, token_id in vocab.items()}
    return [(text[left], text[right]) for _, _, left, right in found]


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]] | None:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        return None
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise StartupError("the GGUF file has a merge that is not two pieces with a space between")
    return pairs


def _add_tokens(tokenizer: Tokenizer, tokens: tuple[str, ...], types: tuple[int, ...]) -> None:
    """Control tokens are special, user-defined ones are matched whole but stay text; both before any normalization."""
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind in (_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])


def _add_post_processor(tokenizer: Tokenizer, metadata: dict[str, Any], config: dict[str, Any]) -> None:
    # Where the file does not say, the family's habit holds: SentencePiece and Llama 3 models start with BOS.
    starts_with_bos = metadata.get("tokenizer.ggml.model") == "llama" or (
        metadata.get("tokenizer.ggml.pre") in _LLAMA3_PRE
    )
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", starts_with_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for name, add in wanted.items():
        if add and name not in config:
            raise StartupError(f"the GGUF file asks to add the {name} but does not name its id")
    bos = [config["bos_token"]] if wanted["bos_token"] else []
    eos = [config["eos_token"]] if wanted["eos_token"] else []
    if not bos and not eos:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(bos + eos)],
    )


def _token_id(metadata: dict[str, Any], key: str, tokens: tuple[str, ...]) -> int | None:
    token_id: int | None = metadata.get(key)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise StartupError(f"the GGUF file's {key} is {token_id}; ids go from 0 to {len(tokens) - 1}")
    return token_id
