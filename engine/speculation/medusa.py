"""Medusa: heads on the target's last hidden state draft a tree of tokens, without a second model.

The previous step stores the hidden state of the row from which a sequence's last token was drawn;
head i predicts the token i + 1 positions further, independently of the other heads. Each head's
likeliest tokens become branches, ordered by the product of their heads' chances, so the first n
nodes are the best tree of n nodes. With a temperature, a head's scores include the noise of the
target's draws at its position.

Stores one state per running sequence, and the length of the text it belongs to. A sequence without
a state (within its prompt, preempted, or after K = 0) gets no proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from engine.model.medusa_heads import MedusaHeads
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import noise_numbers, token_words_of, with_noise
from engine.sampling.row_params import to_device
from engine.scheduling.segment import LAST, HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, UNREADY, Proposal, Proposer, Verified, log_odds

Path = tuple[int, ...]  # rank of the token at each head in turn
Ranked = tuple[list[list[list[int]]], list[list[list[float]]]]  # by sequence and head

_RANKS = 8  # maximum tokens per head if there are no `choices`
_NEAR = 128  # noise is added to this many tokens with the largest scores


class MedusaProposer(Proposer):
    """`choices`: the only paths that a tree may have; all prefixes of a path must be included."""

    name = "medusa"
    learns = True
    hidden = HiddenRows((LAST,))

    def __init__(
        self,
        heads: MedusaHeads,
        processor: LogitsProcessor,
        *,
        choices: Seq[Path] | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._heads, self._processor, self._clock = heads, processor, clock
        self._states: dict[Sequence, tuple[int, Tensor]] = {}
        self._below = below_of(choices) if choices else None
        self._ranks = 1 + max(map(max, choices)) if choices else _RANKS

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """Return a tree of k nodes (or all in `choices`) per sampling chunk with a state."""
        self.forward_seconds = 0.0
        ready = [chunk for chunk in chunks if chunk.samples and chunk.k and self._ready(chunk.seq)]
        if not ready:
            return [UNREADY if chunk.samples and chunk.k else EMPTY for chunk in chunks]
        began = self._clock()
        tokens, logs = self._draft([chunk.seq for chunk in ready], max(chunk.k for chunk in ready))
        self.forward_seconds = self._clock() - began
        trees = {
            chunk.seq: self._tree(each, chances, chunk.k)
            for chunk, each, chances in zip(ready, tokens, logs, strict=True)
        }
        return [trees.get(c.seq, UNREADY) if c.samples and c.k else EMPTY for c in chunks]

    def learn(self, verified: Seq[Verified]) -> None:
        """Store the state of the row from which each sequence's newest token was drawn."""
        for seq, hidden, tokens in [(item.seq, item.hidden, item.tokens) for item in verified]:
            assert hidden is not None
            self._states[seq] = seq.num_tokens + len(tokens), hidden[-1]

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _ready(self, seq: Sequence) -> bool:
        return seq in self._states and self._states[seq][0] == seq.num_tokens

    @torch.inference_mode()
    def _draft(self, seqs: Seq[Sequence], most: int) -> Ranked:
        """Return the likeliest tokens of `most` heads (no tree is deeper) and their log-chances."""
        weights = self._heads.vocabulary
        states = torch.stack([self._states[seq][1] for seq in seqs]).to(weights.dtype)
        every = self._heads(states, most).float().transpose(0, 1)  # [sequences, heads, vocab]
        heads, vocab = every.shape[1:]
        scores, ids = every.topk(min(_NEAR, vocab))
        rows = [(seq, head) for seq in seqs for head in range(heads)]
        scales = np.array([self._processor.fields(seq).scale for seq, _ in rows])
        positions = np.array([seq.num_tokens + head for seq, head in rows])
        if noise := noise_numbers(scales, [seq.params.seed for seq, _ in rows], positions):
            words, flat = token_words_of(vocab, ids.device)[ids], scores.flatten(0, 1)
            noise_on_device = to_device(ids.device, noise)
            scores = with_noise(flat, words.flatten(0, 1), *noise_on_device).view_as(ids)
        best, ranks = scores.topk(min(self._ranks, vocab))
        logs = best - scores.logsumexp(-1, keepdim=True)
        both = torch.stack([ids.gather(-1, ranks).int(), logs.view(torch.int32)]).cpu()
        return both[0].tolist(), both[1].view(torch.float32).tolist()

    def _tree(self, tokens: Seq[Seq[int]], logs: Seq[Seq[float]], k: int) -> Proposal:
        paths = likeliest(logs, k, self._below)
        index_of = {path: node for node, path in enumerate(paths)}
        return Proposal(
            [tokens[len(path) - 1][path[-1]] for path in paths],
            [index_of.get(path[:-1], -1) for path in paths],
            self.name,
            confidences=[log_odds(chance) for chance in paths.values()],
        )


def below_of(choices: Seq[Path]) -> dict[Path, list[int]]:
    """Return, by path, the ranks that may follow it, ascending."""
    ranks: dict[Path, list[int]] = {}
    for path in sorted(choices):
        ranks.setdefault(tuple(path[:-1]), []).append(path[-1])
    return ranks


def likeliest(
    logs: Seq[Seq[float]], k: int, below: Mapping[Path, Seq[int]] | None = None
) -> dict[Path, float]:
    """Return the `k` paths with the largest sums of `logs` (by head and rank, descending) and the
    sums, largest first, each after its prefix. `below`: ranks that may follow a path; None: all."""
    best: dict[Path, float] = {}
    waiting: list[tuple[float, Path, int]] = []  # minus the sum, path, index of its rank

    def offer(before: Path, at: int) -> None:
        if len(before) == len(logs):
            return
        ranks = range(len(logs[len(before)])) if below is None else below.get(before, ())
        if at < len(ranks):
            chance = best.get(before, 0.0) + logs[len(before)][ranks[at]]
            heappush(waiting, (-chance, (*before, ranks[at]), at))

    offer((), 0)
    while waiting and len(best) < k:
        minus, path, at = heappop(waiting)
        best[path] = -minus
        offer(path[:-1], at + 1)
        offer(path, 0)
    return best
