"""The place of one output in its grammar: which tokens may come, and what a token changes."""

from llguidance import LLMatcher

from headrace.common.errors import InvalidRequest, Violation
from headrace.common.grammar_engine import fill_mask
from headrace.core_service.batch import Int32Array
from headrace.core_service.structured.end_tokens import EndTokens
from headrace.core_service.structured.trigger import Trigger


class OutputGrammar:
    """Follows one output. An end-of-sequence token of the request is allowed exactly where the text may end.

    Not for two threads at once: while its mask is filled, nothing else may touch it.
    """

    def __init__(self, matcher: LLMatcher, after: tuple[int, ...], ends: EndTokens) -> None:
        """Takes the matcher over, at the grammar's start, which comes after the ids `after`."""
        self._matcher = matcher
        self._trigger = Trigger(after)
        self._ends = ends
        self._ended = False
        self._exhausted = False

    @property
    def exhausted(self) -> bool:
        """True if the output is complete and no further token may come, an end-of-sequence token aside.

        For any thread, also while a mask is filled.
        """
        return self._exhausted

    def accept(self, token: int) -> bool:
        """Takes the next output token; False, and nothing changes, if the grammar does not allow it."""
        accepted = self._take(token)
        self._note_end()
        return accepted

    def _take(self, token: int) -> bool:
        if not self._trigger.seen:
            self._trigger.push(token)
            return True
        if self._ended:
            return False
        if token in self._ends.request_ids and self._matcher.is_accepting():
            self._ended = True
            return True
        # A refusal by `consume_token` would leave the matcher unusable.
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def replay(self, output: Int32Array) -> None:
        """Takes tokens [n] that were generated before. Raises InvalidRequest if they do not fit."""
        tokens = output.tolist()
        start = 0
        while start < len(tokens) and not self._trigger.seen:
            self._trigger.push(tokens[start])
            start += 1
        # All at once: one by one, a long output would hold up the engine.
        taken = start + int(self._matcher.try_consume_tokens(tokens[start:])) if start < len(tokens) else start
        while taken < len(tokens):
            if not self._take(tokens[taken]):
                raise InvalidRequest(
                    [
                        Violation(
                            "children.generated_token_ids",
                            f"must fit the grammar of structured_outputs; number {taken} (id {tokens[taken]}) does not",
                        )
                    ]
                )
            taken += 1
        self._note_end()

    def _note_end(self) -> None:
        stopped = self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())
        self._exhausted = self._trigger.seen and stopped

    def fill(self, mask: Int32Array) -> None:
        """Writes into `mask` [ceil(vocab_size / 32)] which tokens may come: bit t % 32 of word t // 32.

        None may if the grammar has run into one of its limits.
        """
        if not self._trigger.seen:
            mask[:] = self._ends.everything
        elif self._ended:
            mask[:] = 0
        else:
            fill_mask(self._matcher, mask)
            if self._matcher.is_error():
                mask[:] = 0
            else:
                self._ends.apply(mask)


class CompiledOutputGrammar:
    """A grammar that any number of outputs can start from."""

    def __init__(self, matcher: LLMatcher, after: tuple[int, ...], ends: EndTokens) -> None:
        """`matcher` is at the grammar's start, and stays there."""
        self._matcher = matcher
        self._after = after
        self._ends = ends

    def start(self, output: Int32Array) -> OutputGrammar:
        """The place after the tokens `output` [n], generated before. Raises InvalidRequest if they do not fit."""
        grammar = OutputGrammar(self._matcher.deep_copy(), self._after, self._ends)
        grammar.replay(output)
        return grammar
