"""A request inside the core and its sequences: pure data, no torch.

A `Request` is one prompt with its parameters; a `Sequence` is one completion of it. The sequences of a request share
the prompt's blocks: the first one to run (the leader) computes the prompt, the others wait for it and fork.

    WAITING ──admitted──▶ RUNNING ──ends──▶ FINISHED
       ▲                     │
       └─────preempted───────┘        (blocks freed; prompt and output are computed again, mostly from the prefix cache)
    HELD ──the grammar is compiled, and the leader's step that completes the prompt is planned──▶ WAITING

A fork waits with a reference to the prompt's blocks.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from headrace.common.block_hashes import BlockKeys
from headrace.common.params import SamplingParams
from headrace.core_service.batch import Int32Array, LogitEdits
from headrace.core_service.grammar import Grammar

ClientId = int
QueueKey = tuple[bool, float, float, int, int]


class SequenceState(Enum):
    """Where a sequence is in its life."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what to do with it. Times are seconds on the core's monotonic clock."""

    internal_id: str
    external_id: str
    client: ClientId
    prompt: Int32Array  # [prompt_len]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]  # the primary one first; empty if the output runs past them
    length_limit: int  # prompt and output tokens at which an output ends
    priority: int
    arrival: float  # when the gateway got it, so that a resumed or late request keeps its place
    received: float  # when the core got it
    deadline: float | None = None
    time_limit: float | None = None
    queue_limit: float | None = None  # when it ends unless it has been scheduled
    resumed: bool = False  # it ran on another core before
    awaits_grammar: bool = False
    grammar_after: tuple[int, ...] = ()  # the grammar takes hold after these output tokens
    block_keys: BlockKeys = field(default_factory=BlockKeys)
    edits: LogitEdits | None = None  # what changes the logits of every draw
    serial: int = 0  # given by the scheduler in the order of adding
    sequences: list["Sequence"] = field(default_factory=list)
    held: deque["Sequence"] = field(default_factory=deque)  # not in the queue yet; some may have ended
    num_unfinished: int = 0
    started: bool = False  # some sequence has been scheduled
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    prompt_logprobs_sent: int = 1  # prompt positions whose log-probabilities are out; position 0 has none

    @property
    def reads_prefix_cache(self) -> bool:
        """False while prompt tokens must be computed although they may be cached."""
        if self.params.prompt_logprobs is not None and self.prompt_logprobs_sent < len(self.prompt):
            return False
        return not self.params.skip_reading_prefix_cache


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion. Its tokens live in the sequence table while it runs, else in `output`."""

    request: Request
    slot: int  # the gateway's name for it
    index: int  # position among the n completions
    seed: int
    output: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # [num_output]
    state: SequenceState = SequenceState.WAITING
    row: int = -1  # in the sequence table while running
    held_blocks: list[int] = field(default_factory=list)  # shared prompt blocks of a forked sequence that waits
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    preemptions: int = 0
    queue_key: QueueKey = (False, 0.0, 0.0, 0, 0)  # its place among those that wait
    kept_priority: float = 0.0  # effective priority while it runs
    made_way: bool = False  # it was pushed out for a more important one, and will not be again
    grammar: Grammar | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, while it does not run."""
        return len(self.request.prompt) + len(self.output)
