"""What a drafter must offer. Anything may propose: under sample-and-match the
proposal never enters the output, only the number of steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.scheduling.step_record import Agreement
from engine.speculation.proposal import EMPTY, Proposal


class Proposer(Protocol):
    """`propose` answers one Proposal per chunk, in order, of at most `chunk.k` nodes (empty where
    k is 0 or the chunk does not sample). `follows_grammar`: it puts in by itself what a grammar
    forces. Of the last `propose`: `forward_seconds` is the time spent in model forwards,
    `catch_up_rows` what was run first of committed tokens, beyond one of each sequence, and
    `agreements` what it found out on the way."""

    name: str
    follows_grammar: bool = False
    forward_seconds: float = 0.0
    catch_up_rows: int = 0
    agreements: Seq[Agreement] = ()

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]: ...

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended or gives way: what is kept for it can go."""
        return None


class FreeProposer(Proposer, Protocol):
    """A look-up: its guesses cost nothing to make. `forecast` tells the chances of the next ones to
    be kept, each with all before it; at most `k` of them, none when it has nothing to say or the
    first is not as likely as `least`. For up to `pause` tokens it may be left alone then."""

    pause: int = 0

    def forecast(self, seq: Sequence, k: int, least: float = 0.0) -> list[float]: ...


class NoProposer(Proposer):
    """Speculation off: plain decoding through the same step."""

    name = "none"

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [EMPTY for _ in chunks]
