"""Overhead: what a step costs the host outside its phases."""

from __future__ import annotations

from engine.messages import Reason
from engine.step.clock import Overhead, Stopwatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(
    overhead: Overhead, clock: Clock, *, after: float, speculates: bool,
    reason: Reason | None = None, more: bool = True, sequences: int = 1,
) -> float:  # fmt: skip
    """Run a step of four seconds, one of them for the choice of K, then `after` seconds. The
    default `reason` is that of a usual step."""
    stopwatch = Stopwatch(clock)
    overhead.begin(stopwatch)
    clock.now += 1.0
    overhead.chose(stopwatch())
    clock.now += 3.0
    stopwatch()
    seconds = overhead.seconds(sequences, speculates=speculates)
    clock.now += after
    overhead.end(stopwatch, reason or ("pays" if speculates else "off"), more=more)
    return seconds


def test_time_between_steps_counts_unless_the_engine_is_idle() -> None:
    """Law: sending a step's outputs is part of its cost; waiting for requests is not."""
    overhead, clock = Overhead(), Clock()
    step(overhead, clock, after=0.0, speculates=False)
    clock.now += 0.5
    assert step(overhead, clock, after=0.0, speculates=False, more=False) == 0.5
    clock.now += 99.0
    assert step(overhead, clock, after=0.0, speculates=False) == 0.0


def test_the_controller_is_not_charged_to_a_step_that_it_only_watches() -> None:
    """Bug: a baseline step was charged for choosing and for learning from the steps with draft
    tokens around it. K = 0 looked a tenth more expensive than it is, and speculation stayed on
    where it lost."""
    overhead, clock = Overhead(), Clock()
    for _ in range(9):
        seconds = step(overhead, clock, after=0.25, speculates=True)
    assert seconds == 0.25
    assert step(overhead, clock, after=0.25, speculates=False, reason="baseline") == -1.0
    step(overhead, clock, after=0.125, speculates=False)
    assert step(overhead, clock, after=0.25, speculates=False, reason="baseline") == 0.125


def test_what_the_first_steps_at_a_k_learn_is_not_charged_to_its_trials() -> None:
    """Bug: the controller chooses anew and learns in the first steps at K > 0, for several times
    the usual seconds. Their mean was charged to every later trial, so K stayed at 0 where K = 4
    makes 1.6 times the tokens per second."""
    overhead, clock = Overhead(), Clock()
    step(overhead, clock, after=0.25, speculates=False)
    for after in (49.0, 99.0, 9.0):
        step(overhead, clock, after=after, speculates=True, reason="trial")
    assert step(overhead, clock, after=9.0, speculates=True, reason="trial") == 0.25
    for _ in range(9):
        step(overhead, clock, after=19.0, speculates=True)
    assert step(overhead, clock, after=99.0, speculates=True, reason="trial") == 19.0


def test_a_step_without_draft_tokens_where_they_pay_is_no_step_of_k_0() -> None:
    """Bug: while K > 0, the controller's work in steps with nothing to draft (prompts) counted as a
    cost of K = 0. With four streams of the built-in pair, baselines were charged half a millisecond
    too much, and speculation stayed on at 0.75 of the tokens/s of K = 0."""
    overhead, clock = Overhead(), Clock()
    for _ in range(8):
        step(overhead, clock, after=5.0, speculates=False, reason="pays")
    assert step(overhead, clock, after=0.25, speculates=False, reason="baseline") == -1.0


def test_a_trial_is_charged_as_usual_rounds_would_be() -> None:
    """Bug: choosing K in every round of a trial made K > 0 look twice as expensive for the host."""
    overhead, clock = Overhead(), Clock()
    for _ in range(200):
        step(overhead, clock, after=0.25, speculates=True)
    for _ in range(3):
        seconds = step(overhead, clock, after=9.0, speculates=True, reason="trial")
        assert abs(seconds - 0.25) < 0.01


def test_overhead_of_a_large_batch_is_not_charged_to_one_stream() -> None:
    """Bug: one stream after thirty-two stayed at K = 0 for thousands of steps at 95 % acceptance,
    because it was charged the controller's time for the whole batch."""
    overhead, clock = Overhead(), Clock()
    for _ in range(8):
        step(overhead, clock, after=5.0, speculates=True, sequences=32)
    assert step(overhead, clock, after=5.0, speculates=True, sequences=32) > 3.0
    assert step(overhead, clock, after=0.1, speculates=True, reason="trial") == -1.0


def test_all_time_between_the_phases_of_two_steps_is_reported() -> None:
    """Law: overhead and phases add up to the clock, whatever caused it; a pause without work
    belongs to no step."""
    overhead, clock = Overhead(), Clock()
    seconds = []
    for more in (True, True, False, True):
        stopwatch = Stopwatch(clock)
        seconds.append(overhead.begin(stopwatch))
        clock.now += 4.0
        stopwatch()
        clock.now += 0.25
        overhead.end(stopwatch, "trial", more=more)
        clock.now += 0.5
    assert seconds == [0.0, 0.75, 0.75, 0.0]
