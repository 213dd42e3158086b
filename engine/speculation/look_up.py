"""LookUp: a free proposer that follows each sequence through a text and proposes its next tokens. A
state knows the text and the place in it. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.evidence import Evidence
from engine.speculation.proposal import EMPTY, FreeProposer, Proposal, chain


class LookUpState(ABC):
    """One sequence's place in a text. `at`: index of the next expected token, None while lost;
    `run`: matching tokens before it. Call `extend` before the other methods."""

    def __init__(self, evidence: Evidence, at: int | None, run: int) -> None:
        self._evidence = evidence
        self._at, self._run = at, run
        self._seen = 0  # tokens processed

    @abstractmethod
    def extend(self, seq: Sequence) -> None:
        """Process the tokens committed since the last call."""

    @abstractmethod
    def next(self, seq: Sequence, k: int) -> list[int]:
        """Return at most `k` proposed tokens; none while the place is lost."""

    @abstractmethod
    def most(self, k: int) -> int:
        """Return how many tokens `next` would return for `k`, unless the place is lost."""

    def chances(self, k: int) -> list[float]:
        """Return, for each token of `next`, the chance that it and all before it are right."""
        return [] if self._at is None else self._evidence.chances(self._run, self.most(k))


class LookUp(FreeProposer):
    """`begin` creates the state of a sequence when it is first needed."""

    def __init__(self, name: str, begin: Callable[[Sequence], LookUpState], *, pause: int) -> None:
        self.name, self.pause = name, pause
        self._begin = begin
        self._states: dict[Sequence, LookUpState] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        proposals = []
        for chunk in chunks:
            wanted = chunk.k > 0 and chunk.samples
            tokens = self._state_of(chunk.seq).next(chunk.seq, chunk.k) if wanted else []
            proposals.append(chain(tokens, self.name) if tokens else EMPTY)
        return proposals

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def forecast(self, seq: Sequence, k: int) -> list[float]:
        return self._state_of(seq).chances(k)

    def _state_of(self, seq: Sequence) -> LookUpState:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = self._begin(seq)
        state.extend(seq)
        return state
