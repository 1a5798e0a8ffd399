"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start."""

    steps: int = 0
    output_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
