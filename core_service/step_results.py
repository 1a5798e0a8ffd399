"""Takes a step's result in: tokens, log-probabilities, and the ends that follow from them.

This happens in two parts. `take_tokens` does what the next step needs before it starts; `update` does the rest, which
may run while the next step computes. A row may have gone to another sequence since the step was planned: results of
sequences that have ended are dropped, a token of one that was preempted is still delivered.
"""

import numpy as np
from google.rpc import code_pb2

from headrace.common.v1.params_pb2 import FinishReason
from headrace.core_service.batch import NOTHING_ALLOWED, Int32Array, StepResult
from headrace.core_service.engine_outputs import EngineOutputs, PromptLogprobs
from headrace.core_service.lifecycle import Lifecycle
from headrace.core_service.planned_step import PlannedStep
from headrace.core_service.repetition import ends_in_repetition
from headrace.core_service.request import Sequence, SequenceState

NOT_FINITE_MESSAGE = "the model's logits for this request are not finite"
NOTHING_ALLOWED_MESSAGE = (
    "no token may be drawn: structured_outputs, allowed_token_ids, bad_words and min_tokens together leave none"
)
# Its mask allowed the token, so it fits; what is refused is the work that going on would take.
GRAMMAR_MESSAGE = "structured_outputs: the grammar has become too complex to go on with after this output"


class StepResults:
    """Works on the sequences of one `Lifecycle`."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._grammar_faults: set[Sequence] = set()

    def take_tokens(self, step: PlannedStep, result: StepResult) -> None:
        """Fills the drawn tokens in where later steps read them, and advances grammars."""
        draws, table, tokens = step.draws, self._life.table, result.token_ids
        if not len(draws.rows):
            return
        alive = draws.alive(table)
        # A failed draw's sequence ends in `update`; until then its place holds some id inside the vocabulary.
        known = np.maximum(tokens, 0)
        if alive is None:
            table.set_planned(draws.rows, step.positions, known)
        else:
            table.set_planned(draws.rows[alive], step.positions[alive], known[alive])
        for i, grammar in draws.grammars.items():
            sequence = table.sequences[int(draws.rows[i])] if alive is None or alive[i] else self._owed_to(step, i)
            if sequence is not None and tokens[i] >= 0 and not grammar.accept(int(tokens[i])):
                self._grammar_faults.add(sequence)

    def update(self, step: PlannedStep, result: StepResult, now: float, outputs: EngineOutputs) -> None:
        """Hands tokens and log-probabilities out, and ends what is done."""
        counters = self._life.counters
        counters.steps += 1
        unpredictable = self._collect_prompt_logprobs(step, result, outputs)
        if len(step.draws.rows):
            owed = self._take_owed(step)
            self._hand_out_tokens(step, result, owed, outputs)
            counters.output_tokens += len(outputs.token_ids)
            self._note_times(step, result.token_ids, owed, now)
            self._end_finished(step, result.token_ids, owed, outputs)
        for sequence in unpredictable:
            self._fail(sequence, outputs, NOT_FINITE_MESSAGE)
        self._grammar_faults.clear()

    def _collect_prompt_logprobs(self, step: PlannedStep, result: StepResult, outputs: EngineOutputs) -> list[Sequence]:
        """Passes them on; returns the sequences of which the logits of some prompt token gave no probabilities."""
        failed = []
        wanted_and_found = zip(step.batch.prompt_logprobs, step.prompt_sequences, result.prompt_logprobs, strict=True)
        for wanted, sequence, rows in wanted_and_found:
            if sequence.state is SequenceState.FINISHED:
                continue
            if len(rows.rows) < len(wanted.target_ids):
                failed.append(sequence)
                continue
            outputs.prompt_logprobs.append(PromptLogprobs(sequence, wanted.first_position, rows))
            sequence.request.prompt_logprobs_sent = wanted.first_position + len(wanted.target_ids)
        return failed

    def _owed_to(self, step: PlannedStep, i: int) -> Sequence | None:
        return self._life.owed(int(step.draws.rows[i]), int(step.draws.generation[i]))

    def _take_owed(self, step: PlannedStep) -> dict[int, Sequence | None]:
        """By position in the draws: the preempted owners of tokens whose rows are gone; None if they have ended."""
        draws = step.draws
        alive = draws.alive(self._life.table)
        if alive is None:
            return {}
        return {
            i: self._life.take_owed(int(draws.rows[i]), int(draws.generation[i]))
            for i in np.flatnonzero(~alive).tolist()
        }

    def _hand_out_tokens(
        self, step: PlannedStep, result: StepResult, owed: dict[int, Sequence | None], outputs: EngineOutputs
    ) -> None:
        tokens = result.token_ids
        delivered = tokens >= 0
        for i, sequence in owed.items():
            if sequence is None:
                delivered[i] = False
            elif delivered[i]:
                self._life.waiting.append_token(sequence, int(tokens[i]))
        outputs.set_tokens(step.draws, step.batch.sampling.output_position, result, delivered)

    def _note_times(self, step: PlannedStep, tokens: Int32Array, owed: dict[int, Sequence | None], now: float) -> None:
        draws, table = step.draws, self._life.table
        alive = draws.alive(table)
        table.last_token[draws.rows if alive is None else draws.rows[alive]] = now
        for sequence in owed.values():
            if sequence is not None:
                sequence.last_token = now
        first = (step.batch.sampling.output_position == 0) & (tokens >= 0)
        if first.any():
            for i in np.flatnonzero(first).tolist():
                sequence = owed[i] if i in owed else table.sequence(int(draws.rows[i]))
                if sequence is not None:
                    sequence.first_token = now

    def _end_finished(
        self, step: PlannedStep, tokens: Int32Array, owed: dict[int, Sequence | None], outputs: EngineOutputs
    ) -> None:
        """Stop rules, in this order: end of sequence, stop ids, a complete grammar, length, repetition.

        min_tokens works by masking stop tokens in the draw, so one that is drawn all the same does stop.
        """
        draws, table = step.draws, self._life.table
        is_eos = tokens == draws.primary_eos
        is_stop = (tokens[:, None] == draws.stop_ids).any(axis=1)
        too_long = step.positions + 1 >= draws.length_limit
        suspects = np.flatnonzero(is_eos | is_stop | too_long | (tokens < 0)).tolist()
        if draws.grammars or draws.repetition:
            suspects = sorted({*suspects, *draws.grammars, *draws.repetition})
        for i in suspects:
            sequence = owed[i] if i in owed else table.sequences[int(draws.rows[i])]
            if sequence is None:  # it ended before, perhaps just now with a sibling
                continue
            if tokens[i] < 0:
                message = NOTHING_ALLOWED_MESSAGE if tokens[i] == NOTHING_ALLOWED else NOT_FINITE_MESSAGE
                self._fail(sequence, outputs, message, tokens[i] == NOTHING_ALLOWED)
            elif sequence in self._grammar_faults:
                self._fail(sequence, outputs, GRAMMAR_MESSAGE, clients_doing=True)
            elif is_eos[i]:
                self._life.finish(sequence, FinishReason.FINISH_REASON_STOP, outputs)
            elif is_stop[i]:
                stop_token_id = int(tokens[i])
                self._life.finish(sequence, FinishReason.FINISH_REASON_STOP, outputs, stop_token_id=stop_token_id)
            elif i in draws.grammars and draws.grammars[i].exhausted:
                self._life.finish(sequence, FinishReason.FINISH_REASON_STOP, outputs)
            elif too_long[i]:
                self._life.finish(sequence, FinishReason.FINISH_REASON_LENGTH, outputs)
            elif self._repeats_itself(step, i, sequence):
                self._life.finish(sequence, FinishReason.FINISH_REASON_REPETITION, outputs)

    def _repeats_itself(self, step: PlannedStep, i: int, sequence: Sequence) -> bool:
        rule, end = step.draws.repetition.get(i), int(step.positions[i]) + 1
        start = int(step.draws.prompt_len[i])
        if rule is None or end - start < int(step.draws.min_output[i]):
            return False
        output = sequence.output if sequence.row < 0 else self._life.table.token_ids[sequence.row, start:end]
        return ends_in_repetition(output, rule)

    def _fail(self, sequence: Sequence, outputs: EngineOutputs, message: str, clients_doing: bool = False) -> None:
        """Nothing can be drawn. Siblings without output would draw from the very same logits."""
        code = code_pb2.INVALID_ARGUMENT if clients_doing else code_pb2.INTERNAL
        siblings = sequence.request.sequences if _without_output(sequence) else []
        for one in [sequence, *filter(_without_output, siblings)]:
            self._life.finish(one, FinishReason.FINISH_REASON_ERROR, outputs, code=code, message=message)


def _without_output(sequence: Sequence) -> bool:
    return sequence.first_token is None and not len(sequence.output)
