"""A tokenizer with one token for each byte: for tests, and to try the services without a model's files."""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.common.token_table import byte_alphabet
from headrace.common.tokenizer_files import TokenizerFiles

BOS, EOS = "<bos>", "<eos>"
BOS_ID, EOS_ID = 256, 257


def byte_tokenizer_files(chat_template: str = "", merges: Sequence[tuple[bytes, bytes]] = ()) -> TokenizerFiles:
    """Ids 0 to 255 are bytes, 256 is `<bos>`, 257 is `<eos>`; then come the tokens that `merges` make of two others."""
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)} | {BOS: BOS_ID, EOS: EOS_ID}
    pairs = [tuple("".join(alphabet[byte] for byte in part) for part in merge) for merge in merges]
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (BOS, EOS)])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": BOS, "eos_token": EOS}).encode(),
    }
    if chat_template:
        files["chat_template.jinja"] = chat_template.encode()
    return TokenizerFiles.from_files(files)
