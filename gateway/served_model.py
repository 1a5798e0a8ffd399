"""The model that a gateway serves: what requests are checked against, and the text side's tools for it."""

from dataclasses import dataclass
from functools import cached_property

from headrace.common.params import ModelLimits, SamplingParams
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.chat_template import ChatTemplate
from headrace.gateway.text_tools import TextTools
from headrace.gateway.tokenizer import Tokenizer

TRUNCATED_TEXT_FACTOR = 4


@dataclass(frozen=True)
class ServedModel:
    """Facts that all connected cores agree on, and the smallest of those that may differ.

    `max_text_bytes` is the server's own bound on one prompt's text.
    """

    name: str
    info: core_pb.CoreInfo
    limits: ModelLimits
    default_sampling: SamplingParams
    tools: TextTools
    max_text_bytes: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tools.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self.tools.chat_template

    def max_prompt_bytes(self, *, truncates: bool) -> int:
        """Longest text worth tokenizing.

        A longer one cannot fit into the context even if it were made of the longest tokens only. One that is to be
        truncated may be some times as long, but no more: tokenizing 15 MB to keep ten tokens takes a thread for 20 s.
        """
        fitting = self.limits.max_model_len * self.tools.longest_token_bytes
        return min(self.max_text_bytes, TRUNCATED_TEXT_FACTOR * fitting if truncates else fitting)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids, the primary one first."""
        return tuple(self.info.eos_token_ids)
