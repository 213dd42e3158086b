"""Allowance: how many guesses each proposer may make for each sequence of a step.

Owns what stands between the controller, which chooses one K for the main proposer and prices what
others offer, and the requests, which may bound or choose their proposers. Promises that a sequence
costs little here as long as nobody but the main proposer has something to say about it, and that
what the controller learns about the main proposer comes from sequences that were left to it,
unbounded by their request. Numbers only; who is asked, and in which order, is the cascade's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.control.acceptance import Outcome
from engine.control.controller import KController, Load
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal
from engine.speculation.proposer import FreeProposer

_FIRST_PAUSE = 4  # tokens that go by after the first look that found nothing


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
    """`begin` a step, then `want` once per sequence that samples, `limits` as often as needed,
    `learn` at its end."""

    def __init__(self, controller: KController, main: str, free: Iterable[FreeProposer]) -> None:
        self._controller = controller
        self._main = main
        self._free = {proposer.name: proposer for proposer in free}
        self._limits: dict[Sequence, dict[str, int]] = {}
        # Rounds that others were to serve since the main proposer was asked, the present one too.
        self._missed: dict[Sequence, int] = {}
        self._late = False  # whether one of these is asked now
        self._drafted: dict[Sequence, Proposal] = {}  # of this step, before any were cut
        self._k, self._num_sequences = 0, 1
        self._probed: set[Sequence] | None = None  # sequences that a probe asks

    def begin(self, load: Load, running: Seq[Sequence] = ()) -> None:
        """Choose for the step ahead. A probe asks those whom the drafter knows best already."""
        self._num_sequences = load.num_sequences
        self._k = self._controller.choose(load)
        most = self._controller.max_speculating
        if most is None:
            self._probed = None
        else:
            asked = [seq for seq in running if self._may_ask(seq)]
            self._probed = set(sorted(asked, key=_backlog)[:most])
        self._limits.clear()
        self._drafted.clear()
        self._late = False

    def want(self, seq: Sequence) -> int:
        """How many guesses about `seq` may be verified: so many rows are to be kept for them."""
        if not self._k and len(seq.tokens) < seq.asks_from and seq.constraint is None:
            return 0  # most of a crowd in most rounds at K = 0: as below, in a third of the time
        if seq.constraint is not None and seq.constraint.is_slow:
            seq.sources = ()
        main = self._main_of(seq)
        if seq.sources is None or seq.num_tokens < seq.asks_from:
            return self._asked(seq, main)
        free = self._worth(seq)
        if not free and self.is_open(seq):
            self._pause(seq, seq.sources)
            return self._asked(seq, main)
        seq.pause = 0
        limits = self._limits[seq] = free | {self._main: main}
        if next((name for name in seq.sources if limits.get(name)), None) in free:
            self._missed[seq] = self._missed.get(seq, 0) + 1
        else:
            self._asked(seq, main)
        return max(limits.values())

    def limits(self, seq: Sequence) -> Mapping[str, int] | None:
        """After `want`, how many guesses each proposer may make, by name; None if the sequence is
        left to the main one, unbounded by its request."""
        return self._limits.get(seq)

    def leave(self, seq: Sequence) -> None:
        """Who was to serve it has nothing to say, so the main proposer is asked after all; it has
        to catch up if others served the rounds before."""
        if self._missed.pop(seq, 0) > 1:
            self._late = True

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
        k, told, drafting = self._of_main(walked)
        outcomes, confidences = list[Outcome](), list[list[float]]()
        for item in told:
            made = self.made(item)
            outcome = _outcome(item, made)
            outcomes.append(outcome)
            confidences.append(made.confidences[: outcome.tried])
        return MainOutcomes(k, outcomes, confidences, 0 if self._late else drafting)

    def _of_main(self, walked: Seq[Walked]) -> tuple[int, Seq[Walked], int | None]:
        """The largest K asked of the main proposer, what tells of it, and for how many sequences it
        drafted, None being all of them."""
        if not self._limits:
            return max([item.chunk.k for item in walked], default=0), walked, None
        asked: list[tuple[int, Walked]] = []
        for item in walked:
            if item.chunk.seq not in self._limits:
                asked.append((item.chunk.k, item))
            elif limit := self._left_to_main(item):
                asked.append((limit, item))
        k = max((limit for limit, _ in asked), default=0)
        # A bound that is the request's own is no evidence that there was nothing more to say.
        told = [item for limit, item in asked if limit == k or item.chunk.seq not in self._limits]
        return k, told, len(asked)

    def _left_to_main(self, item: Walked) -> int:
        """Guesses that the main proposer was asked for, when nobody before it had any."""
        if item.proposal.source in (self._main, EMPTY.source):
            return min(self._limits[item.chunk.seq][self._main], item.chunk.k)
        return 0

    def forget(self, seq: Sequence) -> None:
        """It has ended, or starts over."""
        self._missed.pop(seq, None)

    def _pause(self, seq: Sequence, sources: tuple[str, ...]) -> None:
        """The look-ups had nothing that pays: let some tokens go by before the next look, twice as
        many as the last time, since a look takes time. At most four times the number of sequences
        (a crowd's tokens cost less, so a look costs more of them) and `FreeProposer.pause`."""
        most = min((self._free[name].pause for name in sources if name != self._main), default=0)
        seq.pause = min(
            max(2 * seq.pause, _FIRST_PAUSE), max(4 * self._num_sequences, 2 * _FIRST_PAUSE), most
        )
        seq.asks_from = seq.num_tokens + seq.pause

    def _worth(self, seq: Sequence) -> dict[str, int]:
        """By name, how many guesses of each free proposer are worth their rows, where any are."""
        assert seq.sources is not None
        controller, bound = self._controller, seq.max_draft
        most = controller.k_max if bound is None else min(controller.k_max, bound)
        instead = bound != 0 and self._main in seq.sources
        found: dict[str, int] = {}
        if not most:
            return found
        for name in seq.sources:
            if name == self._main:
                continue
            chances = self._free[name].forecast(seq, most)
            if chances and (length := controller.worth(chances, instead=instead)):
                found[name] = length
        return found

    def _may_ask(self, seq: Sequence) -> bool:
        """Whether the main proposer may guess for it."""
        return seq.sources is None or (self._main in seq.sources and seq.max_draft != 0)

    def is_open(self, seq: Sequence) -> bool:
        """Whether the main proposer may make as many guesses as it is asked for."""
        return seq.max_draft is None and self._may_ask(seq)

    def _main_of(self, seq: Sequence) -> int:
        """Guesses of the main proposer, if it is asked."""
        if not self._k or (self._probed is not None and seq not in self._probed):
            return 0
        if not self._may_ask(seq):
            return 0
        return self._k if seq.max_draft is None else min(self._k, seq.max_draft)

    def _asked(self, seq: Sequence, k: int) -> int:
        """The main proposer is asked for `k` guesses about `seq`. Where others served in between,
        it has to catch up first, so this step's time of drafting says nothing. Returns `k`."""
        if k and self._missed.pop(seq, 0):
            self._late = True
        return k


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
