"""A tokenizer's fingerprint: equal for two tokenizers exactly when ids mean the same and text gives the same ids.

It covers what ids stand for and how a set of probe texts is encoded, never the bytes of a file, so that a GGUF file and
a tokenizer.json of one vocabulary agree.
"""

import hashlib
import struct

from tokenizers import Tokenizer

from headrace.common.token_table import build_token_table

# Texts on which pre-tokenizers, normalizers and byte fallback are known to differ. Number characters that are no
# decimal digits ("½") are left out: readers of one and the same GGUF file disagree on them, and that must not part a
# gateway from its core.
PROBES = (
    "Hello, world! It's 2024; they'll say \"hi\" — won't they?",
    "  leading and trailing  ",
    "tabs\tand\nnew\n\nlines\r\n  indented\n    more",
    "1234567890 3.14159 1,000,000",
    "def f(x):\n    return x**2  # comment\n",
    "naïve café Ångström e\u0301 ﬁ",
    "東京特許許可局 你好，世界！ 안녕하세요",
    "नमस्ते दुनिया مرحبا שלום",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "I'LL DON'T we'Re CamelCase snake_case kebab-case",
    "http://example.com/a?b=c&d=%20 user@host <tag attr='v'/>",
    "\u200b\ufeff\u00a0\u3000",
    "▁ Ġ <0x0A> </s>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa        bbbb",
    "",
)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 in lower-case hex over (id, special flag, bytes) of each token and the ids of each probe.

    Probes are encoded with special tokens, so that adding a beginning-of-sequence token or not makes a difference.
    """
    table = build_token_table(tokenizer)
    digest = hashlib.sha256()
    entries = [
        struct.pack("<IBI", token_id, token_id in table.special_ids, len(piece)) + piece
        for token_id, piece in enumerate(table.pieces)
        if piece
    ]
    digest.update(b"".join(entries))
    for encoding in tokenizer.encode_batch_fast(list(PROBES), add_special_tokens=True):
        digest.update(struct.pack(f"<I{len(encoding.ids)}I", len(encoding.ids), *encoding.ids))
    return digest.hexdigest()
