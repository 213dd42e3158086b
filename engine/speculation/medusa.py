"""Medusa: heads on the target's last hidden state guess a tree of tokens, without a second model.

The state behind a sequence's last token but one is what the step before left in the row from which
that last token was drawn; head i then guesses the token i + 1 further on, blind to the others'
guesses. Each head's likeliest tokens become branches, the likeliest paths first by the product of
their heads' chances, so that the first n nodes are the best tree of n nodes. With a temperature a
head's scores have the noise of their positions that the target's draws will have.

Owns one state of each sequence that runs, and the length of the text that it is the last of. A
sequence without (its prompt is not done, it was preempted, or K was 0) is not guessed for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

import torch
from torch import Tensor

from engine.model.medusa_heads import MedusaHeads
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import gumbel_at
from engine.scheduling.segment import LAST, HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified, log_odds

Path = tuple[int, ...]  # of each head in turn, how many of its tokens are likelier

_RANKS = 8  # of a head's tokens, at most, where no choices are given
_NEAR = 128  # tokens with the largest scores, of which one is guessed whatever the noise


class MedusaProposer(Proposer):
    """`choices`: the only paths that a tree may have; with each, the one before it."""

    name = "medusa"
    learns = True
    hidden = HiddenRows((LAST,))

    def __init__(
        self,
        heads: MedusaHeads,
        processor: LogitsProcessor,
        *,
        choices: Seq[Path] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._heads, self._processor, self._clock = heads, processor, clock
        self._states: dict[Sequence, tuple[int, Tensor]] = {}
        self._below = below_of(choices) if choices else None
        self._ranks = 1 + max(map(max, choices)) if choices else _RANKS

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """A tree of k nodes or all that the choices allow, for each sampling chunk whose state is
        known."""
        self.forward_seconds = 0.0
        asked = [chunk for chunk in chunks if chunk.samples and chunk.k and self._knows(chunk.seq)]
        if not asked:
            return [EMPTY] * len(chunks)
        began = self._clock()
        tokens, logs = self._guess([chunk.seq for chunk in asked])
        self.forward_seconds = self._clock() - began
        found = {
            chunk.seq: self._tree(each, chances, chunk.k)
            for chunk, each, chances in zip(asked, tokens, logs, strict=True)
        }
        return [found.get(chunk.seq, EMPTY) if chunk.samples else EMPTY for chunk in chunks]

    def learn(self, verified: Seq[Verified]) -> None:
        """Keep the state of the row from which each one's newest token was drawn."""
        for seq, hidden, tokens in [(item.seq, item.hidden, item.tokens) for item in verified]:
            assert hidden is not None
            self._states[seq] = seq.num_tokens + len(tokens), hidden[-1]

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _knows(self, seq: Sequence) -> bool:
        return seq in self._states and self._states[seq][0] == seq.num_tokens

    @torch.inference_mode()
    def _guess(self, seqs: Seq[Sequence]) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """By sequence and head: the likeliest tokens, and the logarithms of their chances."""
        weights = self._heads.vocabulary
        states = torch.stack([self._states[seq][1] for seq in seqs]).to(weights.dtype)
        every = self._heads(states).float().transpose(0, 1)  # [sequences, heads, vocab]
        heads, vocab = every.shape[1:]
        scores, ids = every.topk(min(_NEAR, vocab))
        scales = [self._processor.fields(seq).scale for seq in seqs]
        if any(scales):
            keys = [
                (seq.params.seed, seq.num_tokens + head) if scale else None
                for seq, scale in zip(seqs, scales, strict=True)
                for head in range(heads)
            ]
            noise = gumbel_at(keys, ids.flatten(0, 1), vocab).view_as(scores)
            factors = torch.tensor([scale or 1.0 for scale in scales], device=scores.device)
            scores = scores * factors[:, None, None] + noise
        best, places = scores.topk(min(self._ranks, vocab))
        logs = best - scores.logsumexp(-1, keepdim=True)
        return ids.gather(-1, places).tolist(), logs.tolist()

    def _tree(self, tokens: Seq[Seq[int]], logs: Seq[Seq[float]], k: int) -> Proposal:
        paths = likeliest(logs, k, self._below)
        places = {path: node for node, path in enumerate(paths)}
        return Proposal(
            [tokens[len(path) - 1][path[-1]] for path in paths],
            [places.get(path[:-1], -1) for path in paths],
            self.name,
            confidences=[log_odds(chance) for chance in paths.values()],
        )


def below_of(choices: Seq[Path]) -> dict[Path, list[int]]:
    """Behind each path, the ranks that go on, rising."""
    found: dict[Path, list[int]] = {}
    for path in sorted(choices):
        found.setdefault(tuple(path[:-1]), []).append(path[-1])
    return found


def likeliest(
    logs: Seq[Seq[float]], k: int, below: Mapping[Path, Seq[int]] | None = None
) -> dict[Path, float]:
    """The `k` paths with the largest sums of `logs` (by head and rank, falling), and these sums,
    largest first, each behind its beginning. `below`: the ranks that may follow a path, if not
    all."""
    found: dict[Path, float] = {}
    waiting: list[tuple[float, Path, int]] = []  # minus the sum, what comes before, which of ranks

    def offer(before: Path, at: int) -> None:
        ranks = _all(logs, before) if below is None else below.get(before, ())
        if at < len(ranks):
            chance = found.get(before, 0.0) + logs[len(before)][ranks[at]]
            heappush(waiting, (-chance, (*before, ranks[at]), at))

    offer((), 0)
    while waiting and len(found) < k:
        minus, path, at = heappop(waiting)
        found[path] = -minus
        offer(path[:-1], at + 1)
        offer(path, 0)
    return found


def _all(logs: Seq[Seq[float]], before: Path) -> range:
    return range(len(logs[len(before)]) if len(before) < len(logs) else 0)
