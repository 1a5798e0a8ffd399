"""What identifies a set of weights: a SHA-256 over the files' content, or over samples of it where they are large."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

# SHA-256 runs at 1 to 2 GB/s: up to here the whole content costs well under a second.
WHOLE_CONTENT_LIMIT = 512 * 2**20
SAMPLE_EVERY = 2**20
SAMPLE_BYTES = 4096
# Covers the header (tensor names, shapes, types) of any GGUF or safetensors file that is worth sampling.
HEADER_BYTES = 8 * 2**20
_CHUNK_BYTES = 2**20


def weights_digest(files: Sequence[Path]) -> str:
    """Hexadecimal digest of the named files, in order of their names.

    Files of up to 512 MiB together are hashed whole. Of larger ones the sizes, the first 8 MiB and 4 KiB out of every
    MiB after that are hashed: other weights (a fine-tune, another quantization) differ nearly everywhere, and reading
    all of a large model a second time would double a cold start. It guards against mixing up models, not against
    forgery.
    """
    digest = hashlib.sha256()
    sizes = {path: path.stat().st_size for path in sorted(files, key=lambda path: path.name)}
    whole = sum(sizes.values()) <= WHOLE_CONTENT_LIMIT
    digest.update(b"whole" if whole else b"sampled")
    for path, size in sizes.items():
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if whole:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                continue
            digest.update(file.read(HEADER_BYTES))
            for offset in range(HEADER_BYTES, size, SAMPLE_EVERY):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
