"""A decoder-only language model: embedding, layers, norm, head."""

import torch
import torch.nn.functional as F

from headrace.core_service.batch import ScheduledBatch
from headrace.core_service.kv_cache import KVCache
from headrace.core_service.models.layers import Attention, DecoderLayer
from headrace.core_service.models.rope import RotaryEmbedding
from headrace.core_service.models.spec import ModelSpec
from headrace.core_service.models.weight_reader import WeightReader
from headrace.kernels.layer_kernels import LayerKernels, StepFacts, StepKernels


class CausalLM:
    """The whole model. Families differ in `attention`, which builds the attention of one layer."""

    attention: type[Attention] = Attention

    def __init__(self, spec: ModelSpec, weights: WeightReader, kernels: LayerKernels, max_len: int) -> None:
        self.spec = spec
        self.kernels = kernels
        self.dtype = weights.dtype
        self._embedding = weights.matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [
            DecoderLayer(spec, weights, kernels, layer, self.attention(spec, weights, layer))
            for layer in range(spec.num_layers)
        ]
        self._norm = weights.vector("model.norm.weight", spec.hidden_size)
        # A packed head is a second copy of a tied embedding: look-ups need plain rows, and the head is a tenth of a
        # small model's work.
        self._head = (
            weights.pack(self._embedding)
            if spec.tie_word_embeddings
            else weights.linear(spec.hidden_size, [("lm_head", spec.vocab_size)], bias=False)
        )
        self._rotary = RotaryEmbedding(spec, max_len)

    @property
    def packed(self) -> bool:
        """Whether linear layers run on packed weights, which may differ from plain ones in the last bit."""
        return self._head.packed

    def forward(self, batch: ScheduledBatch, kv_cache: KVCache) -> torch.Tensor:
        """Runs all layers over a step's tokens and writes their keys and values into the cache.

        Returns the hidden states before the last norm, [num_tokens, hidden] float32.
        """
        step = self._begin_step(batch, kv_cache.block_size)
        residual = F.embedding(torch.from_numpy(batch.token_ids), self._embedding).float()
        update = None
        for layer, (key_cache, value_cache) in zip(self._layers, kv_cache.layers, strict=True):
            update = layer(residual, update, step, key_cache, value_cache)
        return residual if update is None else residual.add_(update)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of rows of `forward`'s result: [num_rows, hidden] → [num_rows, vocab_size] float32."""
        normed = self.kernels.add_norm(hidden, None, self._norm, self.spec.rms_norm_eps, self.dtype)
        return self._head(normed).float()

    def _begin_step(self, batch: ScheduledBatch, block_size: int) -> StepKernels:
        cos, signed_sin = self._rotary.at(torch.from_numpy(batch.positions))
        return self.kernels.begin_step(
            StepFacts(
                query_start=batch.query_start,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                slot_mapping=batch.slot_mapping,
                cos=cos,
                signed_sin=signed_sin,
                num_heads=self.spec.num_heads,
                num_kv_heads=self.spec.num_kv_heads,
                head_dim=self.spec.head_dim,
                block_size=block_size,
            )
        )
