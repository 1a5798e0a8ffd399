"""The text of one completion as it grows: detokenization, stop strings and what may be shown already.

    decoded     T h e   e n d . \\n \\n U s e      stop = "\\n\\nUser:"
    released    T h e                            the last max(len(stop)) - 1 characters wait: a stop may begin there
    token ids   [The][ end]                      an id is released with the last character of its text, never before

Whoever shows deltas, the whole so far or only the end joins the same deltas, so all of them end with the same text.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.gateway.detokenizer import IncrementalDetokenizer
from headrace.gateway.stop_strings import StopMatch, StopStringMatcher
from headrace.gateway.tokenizer import Tokenizer

_NO_TEXT = -1  # an id outside every vocabulary


class TextDelta(NamedTuple):
    """What may be shown now: text, and how many further token ids (with their log-probabilities) go with it.

    `stop_text` is set once, when a stop string ended the output: then the ids released in all are the ids to keep, and
    whatever the core sends afterwards is dropped.
    """

    text: str
    num_token_ids: int
    stop_text: str | None = None


class OutputText:
    """Decodes one completion and ends it at the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """`include_stop` keeps the stop string or stop token in the text.

        No stop string completes inside the first `min_tokens` tokens.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopStringMatcher(stops) if stops else None
        # A stop string that stays in the text need not be held back.
        self._hold_back = self._matcher.reach if self._matcher and not include_stop else 0
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._length = 0  # characters decoded
        self._held = ""  # the last of them, which are not released yet
        self._ends: deque[int] = deque()  # for each id that waits: the length at which its text is complete
        self._over = False

    def push(self, ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Takes the next token ids and returns what may be shown.

        `ends_with_stop_token`: the last id is the end-of-sequence or stop token that ended the output; it stays among
        the ids, but has no text unless stops are included. RuntimeError after the output is over.
        """
        if ends_with_stop_token and not self._include_stop:
            ids = [*ids[:-1], _NO_TEXT]
        self._check_not_over()
        detokenizer = self._detokenizer
        for token_id in ids:
            piece = detokenizer.push(token_id)
            self._num_tokens += 1
            self._length += len(piece)
            self._held += piece
            # An incomplete character always becomes exactly one: itself, or U+FFFD.
            self._ends.append(self._length + 1 if detokenizer.waiting else self._length)
            if self._matcher and piece:
                match = self._matcher.push(piece, may_stop=self._num_tokens > self._min_tokens)
                if match:
                    return self._stop_at(match)
        if self._hold_back or detokenizer.waiting:
            return self._release_part()
        return self._release_all()

    def finish(self) -> TextDelta:
        """The rest, when the output ended for another reason than a stop string. RuntimeError if it is over already."""
        self._check_not_over()
        self._over = True
        rest = self._detokenizer.finish()
        self._held += rest
        self._length += len(rest)
        return self._release_all()

    def _release_all(self) -> TextDelta:
        text, num_token_ids = self._held, len(self._ends)
        self._held = ""
        self._ends.clear()
        return TextDelta(text, num_token_ids)

    def _release_part(self) -> TextDelta:
        """Shows everything but the last `hold_back` characters, and the ids whose text lies before them."""
        held, ends, num_token_ids = self._held, self._ends, 0
        cut = len(held) - self._hold_back
        if cut > 0:
            text, self._held = held[:cut], held[cut:]
        else:
            text = ""
        released = self._length - len(self._held)
        while ends and ends[0] <= released:
            ends.popleft()
            num_token_ids += 1
        return TextDelta(text, num_token_ids)

    def _stop_at(self, match: StopMatch) -> TextDelta:
        """Cuts the text at the stop string and keeps every token up to the one in which it completed."""
        self._over = True
        cut = match.end if self._include_stop else match.start
        released = self._length - len(self._held)
        return TextDelta(self._held[: cut - released], len(self._ends), match.stop)

    def _check_not_over(self) -> None:
        if self._over:
            raise RuntimeError("the output is over: a stop string was found, or finish() was called")
