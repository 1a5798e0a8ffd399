"""What a request asks for, and the rules that it must keep.

Names, defaults and rules follow vLLM's `SamplingParams`, so that code written for it reads the same here. The same
rules run in the gateway (which answers the client) and again in the core (which trusts nobody).
`headrace.common.params_wire` converts to and from the contract's messages.
"""

import itertools
import math
from dataclasses import dataclass, replace

from headrace.common.errors import Violation
from headrace.common.grammar_rules import StructuredOutputsParams, constraint_violations

DEFAULT_MAX_TOKENS = 16
MAX_N = 16_384
MAX_BAD_WORDS = 128  # words, and token sequences that they become
MAX_BAD_WORD_TOKENS = 1024  # of one sequence
MAX_LOGIT_BIAS = 100.0  # a bias further from 0 counts as this
MAX_LOGPROB_TOKEN_IDS = 128
MAX_REPETITION_SPAN = 4096  # max_pattern_size x min_count of repetition detection: tokens looked at in every step
MAX_STOP_TOKEN_IDS = 256
MAX_TIME_LIMIT_S = 1e9
MAX_NAMED = 5  # bad entries of one list that are named; the rest goes unsaid
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The facts of a model that parameters are checked against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends an output whose last tokens are `min_count` copies of `min_pattern_size` to `max_pattern_size` tokens."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when an output ends.

    `max_tokens=None` means up to the end of the context. `seed=None` lets the gateway draw one.
    `prompt_logprob_start=None` means position 1, the first whose token the model predicts.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_start: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool = False
    time_limit_s: float | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def first_prompt_logprob(self) -> int:
        """First prompt position whose log-probabilities are wanted, if any are; nothing predicts position 0."""
        return max(self.prompt_logprob_start or 0, 1)

    def normalized(self) -> "SamplingParams":
        """Equal parameters in one form.

        Greedy switches the filters off, tiny temperatures are raised, -1 means off, biases are clamped. Who asks only
        for the log-probabilities of some ids gets those of the drawn (or the prompt's) token too.
        """
        greedy = self.greedy
        logprobs, prompt_logprobs = self.logprobs, self.prompt_logprobs
        return replace(
            self,
            temperature=0.0 if greedy else max(self.temperature, LOWEST_TEMPERATURE),
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy else max(self.top_k, 0),
            min_p=0.0 if greedy else self.min_p,
            logprobs=0 if logprobs is None and self.logprob_token_ids else logprobs,
            prompt_logprobs=0 if prompt_logprobs is None and self.prompt_logprob_token_ids else prompt_logprobs,
            logit_bias=self.logit_bias
            and {i: min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for i, bias in self.logit_bias.items()},
        )

    def violations(self, limits: ModelLimits) -> list[Violation]:
        """Every rule that these parameters break, under the public contract's field names; empty if they are good."""
        found = _Violations()
        self._check_sampling(found)
        self._check_limits(found, limits)
        self._check_token_ids(found, limits)
        self._check_text(found)
        if self.structured_outputs is not None:
            found.list += constraint_violations(self.structured_outputs)
        return found.list

    def prompt_violations(self, num_tokens: int) -> list[Violation]:
        """The rules that need the prompt's length in tokens."""
        start = self.prompt_logprob_start
        if start is None or start < num_tokens:
            return []
        field = "sampling.prompt_logprob_start"
        return [Violation(field, f"must be below the prompt's length ({num_tokens} tokens); got {start}")]

    def _check_sampling(self, found: "_Violations") -> None:
        found.integer("sampling.n", self.n, 1, MAX_N)
        found.number("sampling.temperature", self.temperature, 0, 2)
        found.number("sampling.top_p", self.top_p, 0, 1, above_low=True)
        if self.top_k < -1:
            found.add("sampling.top_k", f"must be at least 1, or 0 or -1 for off; got {self.top_k}")
        found.number("sampling.min_p", self.min_p, 0, 1)
        if self.seed is not None:
            found.integer("sampling.seed", self.seed, 0, 2**64 - 1)
        found.number("sampling.presence_penalty", self.presence_penalty, -2, 2)
        found.number("sampling.frequency_penalty", self.frequency_penalty, -2, 2)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            found.add("sampling.repetition_penalty", f"must be finite and above 0; got {self.repetition_penalty}")

    def _check_limits(self, found: "_Violations", limits: ModelLimits) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            found.add("sampling.max_tokens", f"must be at least 1; got {self.max_tokens}")
        most = limits.max_model_len if self.max_tokens is None else self.max_tokens
        if self.min_tokens < 0 or self.min_tokens > max(most, 0):
            found.add("sampling.min_tokens", f"must be between 0 and max_tokens ({most}); got {self.min_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is None:
                continue
            wanted = limits.vocab_size if count == -1 else count
            if count < -1 or wanted > limits.max_logprobs:
                found.add(
                    f"sampling.{name}",
                    f"must be between 0 and {limits.max_logprobs}, or -1 for the whole vocabulary "
                    f"({limits.vocab_size}) where that many are allowed; got {count}",
                )
        if self.time_limit_s is not None:
            found.number("sampling.time_limit", self.time_limit_s, 0, MAX_TIME_LIMIT_S, above_low=True)
        if self.prompt_logprob_start is not None and self.prompt_logprob_start < 0:
            found.add("sampling.prompt_logprob_start", f"must be at least 0; got {self.prompt_logprob_start}")
        if self.repetition_detection is not None:
            self._check_repetition(found, self.repetition_detection)

    def _check_repetition(self, found: "_Violations", rule: RepetitionDetectionParams) -> None:
        field = "sampling.repetition_detection"
        if rule.min_pattern_size < 1:
            found.add(f"{field}.min_pattern_size", f"must be at least 1; got {rule.min_pattern_size}")
        if rule.max_pattern_size < max(rule.min_pattern_size, 1):
            found.add(
                f"{field}.max_pattern_size",
                f"must be at least min_pattern_size ({rule.min_pattern_size}) and 1; got {rule.max_pattern_size}",
            )
        if rule.min_count < 2:
            found.add(f"{field}.min_count", f"must be at least 2; got {rule.min_count}")
        if (span := rule.max_pattern_size * rule.min_count) > MAX_REPETITION_SPAN:
            found.add(
                field,
                f"max_pattern_size x min_count must be at most {MAX_REPETITION_SPAN} tokens; got "
                f"{rule.max_pattern_size} x {rule.min_count} = {span}",
            )

    def _check_token_ids(self, found: "_Violations", limits: ModelLimits) -> None:
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
            ("prompt_logprob_token_ids", self.prompt_logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
        ):
            found.token_ids(f"sampling.{name}", ids, limits.vocab_size)
            if len(ids) > most:
                found.add(f"sampling.{name}", f"at most {most} ids; got {len(ids)}")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                found.add("sampling.allowed_token_ids", "must not be empty where it is given")
            found.token_ids("sampling.allowed_token_ids", self.allowed_token_ids, limits.vocab_size)
        if self.logit_bias:
            found.token_ids("sampling.logit_bias", tuple(self.logit_bias), limits.vocab_size)
            infinite = ((token_id, bias) for token_id, bias in self.logit_bias.items() if not math.isfinite(bias))
            for token_id, bias in itertools.islice(infinite, MAX_NAMED):
                found.add(f"sampling.logit_bias[{token_id}]", f"must be finite; got {bias}")

    def _check_text(self, found: "_Violations") -> None:
        if any(not text for text in self.stop):
            found.add("text_options.stop", "must not hold an empty string")
        if self.stop and not self.detokenize:
            found.add("text_options.stop", "needs detokenize = true, since stop strings are matched on text")
        if any(not word for word in self.bad_words):
            found.add("text_options.bad_words", "must not hold an empty word")
        if len(self.bad_words) > MAX_BAD_WORDS:
            found.add("text_options.bad_words", f"at most {MAX_BAD_WORDS} words; got {len(self.bad_words)}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            found.add("text_options.truncate_prompt_tokens", f"must be at least 1; got {self.truncate_prompt_tokens}")


class _Violations:
    """Collects violations; one method a kind of rule, so that messages of one kind read alike."""

    def __init__(self) -> None:
        self.list: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self.list.append(Violation(field, description))

    def integer(self, field: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            self.add(field, f"must be between {low} and {high}; got {value}")

    def number(self, field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
        inside = low < value <= high if above_low else low <= value <= high
        if not inside:  # NaN compares false, so it lands here too
            bounds = f"above {low} and at most {high}" if above_low else f"between {low} and {high}"
            self.add(field, f"must be {bounds}; got {value:g}")

    def token_ids(self, field: str, ids: tuple[int, ...], vocab_size: int) -> None:
        bad = [i for i in ids if not 0 <= i < vocab_size]
        if bad:
            self.add(field, f"ids must be between 0 and {vocab_size - 1}; got {', '.join(map(str, bad[:MAX_NAMED]))}")
