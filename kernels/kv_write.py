"""Writes new keys and values into the paged cache.

A layer's cache is [num_blocks, num_kv_heads, block_size, head_dim]. Seen as rows of head_dim, token slot s = block *
block_size + offset of head h lies in row (block * num_kv_heads + h) * block_size + offset.
"""

import torch


def cache_rows(slot_mapping: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Rows of the cache for token slots [num_tokens] int64 → [num_tokens * num_kv_heads] int64, heads side by side."""
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    heads = torch.arange(num_kv_heads)
    return ((blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]).reshape(-1)


def kv_write(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: torch.Tensor
) -> None:
    """Stores keys and values [num_tokens, num_kv_heads, head_dim] in the rows that `cache_rows` gave."""
    head_dim = keys.shape[-1]
    key_cache.view(-1, head_dim).index_copy_(0, rows, keys.reshape(-1, head_dim))
    value_cache.view(-1, head_dim).index_copy_(0, rows, values.reshape(-1, head_dim))
