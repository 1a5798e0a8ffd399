"""Health is progress: when a core counts as hung."""

from headrace.core_service.progress import ProgressWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_watch() -> tuple[ProgressWatch, Clock]:
    clock = Clock()
    return ProgressWatch(clock), clock


def test_an_idle_core_is_healthy_for_ever() -> None:
    watch, clock = make_watch()
    clock.now += 10_000
    assert watch.healthy
    assert watch.oldest_pending_s is None


def test_pending_work_without_a_step_is_a_hang_after_five_seconds() -> None:
    watch, clock = make_watch()
    watch.set_pending(True)
    clock.now += 4.9
    assert watch.healthy
    clock.now += 0.2
    assert not watch.healthy
    watch.step_finished()
    assert watch.healthy


def test_a_core_with_slow_steps_gets_four_times_the_slowest_of_them() -> None:
    watch, clock = make_watch()
    watch.set_pending(True)
    clock.now += 4
    watch.step_finished()
    clock.now += 15.9
    assert watch.healthy
    clock.now += 0.2
    assert not watch.healthy


def test_a_long_prompt_gets_time_for_its_tokens_before_any_step_has_ended() -> None:
    watch, clock = make_watch()
    watch.set_pending(True)
    watch.step_started(2048)
    clock.now += 20
    assert watch.healthy
    clock.now += 1
    assert not watch.healthy


def test_work_that_ends_stops_the_clock() -> None:
    watch, clock = make_watch()
    watch.set_pending(True)
    clock.now += 3
    watch.set_pending(False)
    watch.set_pending(True)
    clock.now += 3
    assert watch.healthy
