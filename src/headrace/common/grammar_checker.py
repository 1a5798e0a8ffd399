"""Whether a constraint compiles, found out where it can do no harm; the gateway and the core both ask."""

import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass

from headrace.common.errors import InternalError, InvalidRequest, Overloaded, Unimplemented, Violation
from headrace.common.grammar_rules import FIELD, FIELDS, StructuredOutputsParams, constraint_kind, constraint_violations
from headrace.common.limited_worker import LimitedWorker, WorkerLimits, WorkerLost, WorkerOverrun

WORKER = "headrace.common.grammar_worker"
REMEMBERED_CONSTRAINTS = 128


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out of a check: a grammar, or what is wrong."""

    grammar: str = ""
    violations: tuple[Violation, ...] = ()

    def get(self) -> str:
        """The constraint as llguidance's grammar. Raises InvalidRequest if it is not to be used."""
        if self.violations:
            raise InvalidRequest(list(self.violations))
        return self.grammar


class GrammarChecker:
    """For one vocabulary. Any thread may call `check`; checks run one after the other, in a child process.

    The child starts with the first constraint (about 0.3 s) and is replaced when a constraint has ended it.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int | None,
        eos_token_ids: tuple[int, ...],
        limits: WorkerLimits | None = None,
    ) -> None:
        """`vocab_size` is that of the model's head; None is the tokenizer's own."""
        self._tokenizer_json = tokenizer_json
        self._facts = json.dumps({"vocab_size": vocab_size, "eos_token_ids": eos_token_ids}).encode()
        self._limits = limits or WorkerLimits()
        self._checking = threading.Lock()
        self._remembering = threading.Lock()
        self._verdicts: OrderedDict[StructuredOutputsParams, Verdict] = OrderedDict()
        self._worker: LimitedWorker | None = None

    def remembered(self, params: StructuredOutputsParams) -> Verdict | None:
        """The verdict on a constraint that was checked not long ago; returns at once."""
        with self._remembering:
            if params in self._verdicts:
                self._verdicts.move_to_end(params)
            return self._verdicts.get(params)

    def check(self, params: StructuredOutputsParams) -> Verdict:
        """Whether the constraint compiles within the limits.

        A violation names the field and, in a JSON schema, the path. Raises Overloaded if the child got no processor
        time or was ended by somebody, Unimplemented if llguidance does not know this kind of tokenizer.
        """
        if violations := constraint_violations(params):
            return Verdict(violations=tuple(violations))
        if (verdict := self.remembered(params)) is not None:
            return verdict
        with self._checking:
            # Another thread may have asked the same meanwhile.
            verdict = self.remembered(params) or self._exchange(params)
        with self._remembering:
            self._verdicts[params] = verdict
            if len(self._verdicts) > REMEMBERED_CONSTRAINTS:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """Ends the child process."""
        if self._worker is not None:
            self._worker.close()

    def _exchange(self, params: StructuredOutputsParams) -> Verdict:
        try:
            if self._worker is None or self._worker.dead:
                self._worker = LimitedWorker(WORKER, self._facts + b"\n" + self._tokenizer_json, self._limits)
            answer = json.loads(self._worker.exchange(json.dumps(asdict(params)).encode()))
        except WorkerLost as lost:
            raise Overloaded(f"{FIELD} could not be checked: that {lost}", reason="TOO_BUSY_TO_COMPILE") from lost
        except WorkerOverrun as overrun:
            kind = constraint_kind(params)
            assert kind is not None, "checked before"
            return Verdict(violations=(Violation(FIELDS[kind], f"is too complex: compiling it {overrun}"),))
        except OSError as error:
            raise InternalError(f"cannot start a process to check {FIELD}: {error}") from error
        if "unsupported" in answer:
            raise Unimplemented(f"{FIELD}: not with this model's tokenizer: {answer['unsupported']}")
        return Verdict(answer["grammar"], tuple(Violation(*violation) for violation in answer["violations"]))
