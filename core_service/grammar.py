"""What the scheduler knows of a grammar: it is compiled elsewhere, follows the output, and says which tokens may come.

No grammar library here: `headrace.core_service.structured` has the real ones.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.core_service.batch import GrammarMasks, Int32Array


class Grammar(Protocol):
    """The place of one output in its grammar."""

    @property
    def exhausted(self) -> bool:
        """True if the output is complete and no further token may come, an end-of-sequence token aside."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the next output token; False if the grammar does not allow it: the output must end with an error."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready to be used by any number of outputs."""

    def start(self, output: Int32Array) -> Grammar:
        """The place after the tokens `output` [n], generated before. Raises RequestError if they do not fit."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars and fills masks, both off the engine's thread."""

    def compile(
        self, constraint: StructuredOutputsParams, after: tuple[int, ...], eos_token_ids: tuple[int, ...]
    ) -> "Future[CompiledGrammar]":
        """The grammar of a constraint, which takes hold once the ids `after` have appeared in the output (empty: at
        once). The future raises RequestError if it does not compile, or not within the limits of time and size."""
        ...

    def begin_masks(self, rows: Int32Array, grammars: Sequence[Grammar]) -> GrammarMasks:
        """Starts filling the masks of positions `rows` in the samples, one for each grammar; returns at once. Until the
        masks have been waited for, the grammars must not change; whether they are exhausted may be read."""
        ...

    def close(self) -> None:
        """Ends its processes and threads, without waiting for work under way."""
        ...
