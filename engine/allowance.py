"""Allowance: how many guesses each proposer may make for each sequence of a step.

Owns what stands between the controller, which chooses one K for the main proposer and prices what
others offer, and the requests, which may bound or choose their proposers. Promises that a sequence
without wishes costs nothing here, and that what the controller learns about the main proposer comes
from sequences that were left to it, unbounded by their request. Numbers only; who is asked, and in
which order, is the cascade's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.controller import KController, Load
from engine.estimates import Outcome
from engine.sequence import Sequence
from engine.speculation.proposal import EMPTY, Proposal
from engine.step_plan import Chunk

Forecast = Callable[[Sequence, int], list[float]]  # see speculation.proposer.FreeProposer


class Walked(Protocol):
    """One sampling chunk after its step (acceptance.Sampled)."""

    @property
    def chunk(self) -> Chunk: ...

    @property
    def proposal(self) -> Proposal: ...

    @property
    def num_accepted(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class MainOutcomes:
    """The part of a step that tells of the main proposer; see controller.StepObservation."""

    k: int
    outcomes: list[Outcome]
    confidences: list[list[float]]
    num_drafting: int | None


class Allowance:
    """`begin` a step, then `want` once per sequence that samples, `of` as often as needed, `learn`
    at its end. `forecasts`: by name, of the free proposers."""

    def __init__(
        self, controller: KController, main: str, forecasts: Mapping[str, Forecast]
    ) -> None:
        self._controller = controller
        self._main = main
        self._forecasts = dict(forecasts)
        self._limits: dict[Sequence, dict[str, int]] = {}
        self._missed: set[Sequence] = set()  # sampled last without the main proposer
        self._drafted: dict[Sequence, Proposal] = {}  # of this step, before any were cut
        self._k = 0
        self._probed: set[Sequence] | None = None  # sequences that a probe asks

    def begin(self, load: Load, running: Seq[Sequence] = ()) -> None:
        """Choose for the step ahead. A probe asks those whom the drafter knows best already."""
        self._k = self._controller.choose(load)
        most = self._controller.max_speculating
        if most is None:
            self._probed = None
        else:
            asked = [seq for seq in running if self._may_ask(seq)]
            self._probed = set(sorted(asked, key=_backlog)[:most])
        self._limits.clear()
        self._drafted.clear()

    def want(self, seq: Sequence) -> int:
        """Rows to keep for guesses about `seq`."""
        if seq.constraint is not None and seq.constraint.is_slow:
            seq.sources = ()
        if seq.sources is None:
            return self._main_of(seq, self._k)
        limits = {name: self._limit(seq, name) for name in seq.sources}
        self._limits[seq] = limits
        return max(limits.values(), default=0)

    def of(self, seq: Sequence, name: str) -> int:
        """Guesses that `name` may make for a sequence with wishes, after `want`."""
        return self._limits[seq].get(name, 0)

    def keep(self, chunks: Seq[Chunk], proposals: list[Proposal]) -> list[Proposal]:
        """The proposals, the main proposer's without the guesses that are not worth their rows.
        Lawful since a proposal never influences a token (speculation.verify)."""
        sure = [i for i, proposal in enumerate(proposals) if proposal.confidences]
        if not sure:
            return proposals
        kept = list(proposals)
        lengths = self._controller.keep([proposals[i].confidences for i in sure])
        for i, length in zip(sure, lengths, strict=True):
            if length < len(proposals[i]):
                self._drafted[chunks[i].seq] = proposals[i]
                kept[i] = proposals[i].trim(length) if length else EMPTY
        return kept

    def made(self, item: Walked) -> Proposal:
        """Its proposal before guesses were left out of it by `keep`."""
        return self._drafted.get(item.chunk.seq, item.proposal)

    def learn(self, walked: Seq[Walked]) -> MainOutcomes:
        """What tells of the main proposer. The free ones know their own chances."""
        if not self._limits:
            k = max((item.chunk.k for item in walked), default=0)
            return self._told(k, walked, None)
        asked: list[tuple[int, Walked]] = []
        fresh = True
        for item in walked:
            seq = item.chunk.seq
            if seq.sources is None:
                asked.append((item.chunk.k, item))
            elif limit := self._left_to_main(item):
                asked.append((limit, item))
                fresh = fresh and seq not in self._missed
                self._missed.discard(seq)
            else:
                self._missed.add(seq)
        k = max((limit for limit, _ in asked), default=0)
        # A bound that is the request's own is no evidence that there was nothing more to say.
        told = [item for limit, item in asked if limit == k or item.chunk.seq.sources is None]
        return self._told(k, told, len(asked) if fresh else 0)

    def _told(self, k: int, walked: Seq[Walked], num_drafting: int | None) -> MainOutcomes:
        outcomes: list[Outcome] = []
        confidences: list[list[float]] = []
        for item in walked:
            made = self.made(item)
            outcome = _outcome(item, made)
            outcomes.append(outcome)
            confidences.append(made.confidences[: outcome.tried])
        return MainOutcomes(k, outcomes, confidences, num_drafting)

    def _left_to_main(self, item: Walked) -> int:
        """Guesses that the main proposer was asked for, when nobody before it had any."""
        if item.proposal.source in (self._main, EMPTY.source):
            return min(self._limits[item.chunk.seq].get(self._main, 0), item.chunk.k)
        return 0

    def forget(self, seq: Sequence) -> None:
        """It has ended, or starts over."""
        self._missed.discard(seq)

    def _limit(self, seq: Sequence, name: str) -> int:
        bound = seq.max_draft
        if name == self._main:
            return self._main_of(seq, self._k if bound is None else min(self._k, bound))
        most = self._controller.k_max if bound is None else min(self._controller.k_max, bound)
        assert seq.sources is not None
        instead = self._main in seq.sources
        return self._controller.worth(self._forecasts[name](seq, most), instead=instead)

    def _may_ask(self, seq: Sequence) -> bool:
        """Whether the main proposer may guess for it."""
        return seq.sources is None or (self._main in seq.sources and seq.max_draft != 0)

    def _main_of(self, seq: Sequence, k: int) -> int:
        return k if self._probed is None or seq in self._probed else 0


def _backlog(seq: Sequence) -> int:
    """Positions that the drafter has not run."""
    return seq.num_tokens - seq.num_draft_computed


def _outcome(item: Walked, drafted: Proposal) -> Outcome:
    """What was left out of the forward is compared with the tokens that came."""
    if not drafted.is_chain:
        accepted = item.num_accepted
        return Outcome(len(drafted), min(len(drafted), accepted + 1), accepted)
    guesses, tokens = drafted.tokens, item.tokens
    tried, right = min(len(guesses), len(tokens)), 0
    while right < tried and guesses[right] == tokens[right]:
        right += 1
    return Outcome(len(guesses), min(tried, right + 1), right)
