"""Propose, verify and accept: the part of a step that computes, in one of its two ways."""

from __future__ import annotations

from engine.messages import StepSeconds
from engine.model.draws import Draws
from engine.model.runner import ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.scheduling.step_plan import StepPlan
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.grammar import within_grammars
from engine.speculation.proposer import Proposer
from engine.step.acceptance import Acceptor, Sampled, segments
from engine.step.clock import Stopwatch
from engine.step.one_wait import OneWait


class Rounds:
    """`runner` is the target's, `main` the main proposer of `proposer`."""

    def __init__(
        self,
        proposer: Cascade,
        main: Proposer,
        allowance: Allowance,
        runner: ModelRunner,
        acceptor: Acceptor,
        draws: Draws,
    ) -> None:
        self._proposer = proposer
        self._allowance = allowance
        self._runner = runner
        self._acceptor = acceptor
        self._one_wait = None
        if isinstance(main, DraftModelProposer) and isinstance(draws, DeviceDraws):
            self._one_wait = OneWait(main, proposer, allowance, runner, acceptor, draws)

    def __call__(self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch) -> list[Sampled]:
        """One for each chunk that samples; `seconds` are filled in for these three."""
        sampled = self._one_wait(plan, seconds, lap) if self._one_wait else None
        if sampled is None:
            sampled = self._step_by_step(plan, seconds, lap)
        seconds.accept, seconds.verify_forward = lap(), self._runner.seconds
        settle(seconds)
        return sampled

    def _step_by_step(self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch) -> list[Sampled]:
        """The host knows every guess before it is verified."""
        proposals = self._proposer.propose(plan.chunks)
        if any(proposals):
            proposals = within_grammars(plan.chunks, proposals)
            proposals = self._allowance.keep(plan.chunks, proposals)
        seconds.propose, seconds.propose_forward = lap(), self._proposer.forward_seconds
        output = self._runner.forward(segments(plan, proposals))
        seconds.verify = lap()
        return self._acceptor.accept(plan, proposals, output)


def settle(seconds: StepSeconds) -> None:
    """What a device still computed of the forwards, while the host had gone on to accept, is
    counted as drafting and verification. On a CPU nothing moves."""
    late = min(max(seconds.propose_forward - seconds.propose, 0.0), seconds.accept)
    seconds.propose += late
    seconds.accept -= late
    late = min(max(seconds.verify_forward - seconds.verify, 0.0), seconds.accept)
    seconds.verify += late
    seconds.accept -= late
