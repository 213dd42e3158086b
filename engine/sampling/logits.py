"""Rows of logits to rows of final log-probabilities: the only place where sampling fields act.

Order, as vLLM and transformers have it: logit_bias, min_tokens, repetition penalty, frequency and
presence penalties, grammar, temperature, top_k, top_p, min_p. What is removed becomes -inf.

Promises: a row of the result depends on that row's logits and context alone, to the bit on the CPU;
the given logits are never written to. A row is log-probabilities up to one constant of that row:
nothing here needs the constant, and neither does an argmax with noise.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.messages import SamplingParams
from engine.sampling.filters import keep_most_likely
from engine.sampling.penalties import Penalties, PenaltyTables, is_penalised
from engine.sampling.plain import Plain, plain_of, scale_at
from engine.scheduling.constraint import Constraint
from engine.scheduling.sequence import Sequence

_MAX_HISTORIES = 128
_MAX_PLAIN = 4096  # sequences


@dataclass(slots=True)
class RowContext:
    """What a row of logits follows: the committed tokens of `seq`, then `path`, the proposed tokens
    on the way to this row (empty for the root)."""

    seq: Sequence
    path: list[int]

    @property
    def position(self) -> int:
        """Absolute position of the token that this row predicts."""
        return len(self.seq.tokens) + len(self.path)

    @property
    def num_output(self) -> int:
        """Generated tokens before the one that this row predicts."""
        return len(self.seq.tokens) - self.seq.num_prompt + len(self.path)


@dataclass(slots=True)
class _Run:
    """Neighbouring rows of one sequence."""

    seq: Sequence
    first: int
    contexts: list[RowContext]

    @property
    def stop(self) -> int:
        return self.first + len(self.contexts)


class _History:
    """Committed tokens of one sequence as the penalties need them, kept up to date by appending."""

    def __init__(self, seq: Sequence, *, like: Tensor) -> None:
        self.seq = seq
        self.seen: set[int] = set()  # prompt and generated
        self.seen_ids = torch.empty(0, dtype=torch.int64, device=like.device)
        self.counts: Counter[int] = Counter()  # generated
        self.count_row = like.new_zeros(like.shape[1])  # the same, [vocab]
        self._length = 0

    def fits(self, seq: Sequence, *, like: Tensor) -> bool:
        same = self.seq is seq and self._length <= len(seq.tokens)
        return same and self.count_row.shape[0] == like.shape[1]

    def catch_up(self) -> None:
        tokens, start = self.seq.tokens, self._length
        if start == len(tokens):
            return
        self._length = len(tokens)
        new = [token for token in dict.fromkeys(tokens[start:]) if token not in self.seen]
        if new:
            self.seen.update(new)
            added = torch.tensor(new, device=self.seen_ids.device)
            self.seen_ids = torch.cat([self.seen_ids, added])
        generated = tokens[max(start, self.seq.num_prompt) :]
        if generated:
            self.counts.update(generated)
            changed = list(dict.fromkeys(generated))
            self.count_row[changed] = self.count_row.new_tensor([self.counts[t] for t in changed])


class LogitsProcessor:
    """`eos_ids` are what `min_tokens` makes impossible, besides the request's stop_token_ids."""

    def __init__(self, eos_ids: Collection[int]) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._histories: OrderedDict[int, _History] = OrderedDict()
        self._plain: dict[Sequence, Plain | None] = {}
        self._penalties = PenaltyTables()

    def finalize(self, logits: Tensor, contexts: Seq[RowContext]) -> Tensor:
        """[rows, vocab] float32 logits, one context per row -> [rows, vocab] log-probabilities.

        Rows of a sequence should be neighbours (they are cheaper then); the result is the same if
        they are not. Returns `logits` itself when no field asks for anything.
        """
        runs = _runs(contexts)
        out = _temper(self._adjusted(logits, runs), runs)
        filtered = [run for run in runs if _is_filtered(run.seq.params)]
        return _filter(out, filtered) if filtered else out

    def adjust(self, logits: Tensor, contexts: Seq[RowContext]) -> Tensor:
        """`finalize` up to the grammar: what is left to do is in plain.plain_of each request."""
        return self._adjusted(logits, _runs(contexts))

    def plain(self, seq: Sequence) -> Plain | None:
        """What the next rows of `seq` are drawn with if that is all that its fields ask for now
        and later, else None."""
        if seq not in self._plain:
            if len(self._plain) >= _MAX_PLAIN:
                self._plain.clear()
            run = _Run(seq, 0, [RowContext(seq, [])])
            if _is_adjusted(run):
                if seq.params.min_tokens:  # which may end
                    return None
                self._plain[seq] = None
            else:
                self._plain[seq] = plain_of(seq.params)
        return self._plain[seq]

    def penalised(self, seq: Sequence) -> tuple[Plain, Penalties] | None:
        """What the next rows of `seq` are drawn with if its fields ask for penalties now and later,
        and for nothing else, else None."""
        params = seq.params
        early = seq.num_output < params.min_tokens
        if early or params.logit_bias or seq.constraint is not None or not is_penalised(params):
            return None
        return plain_of(params), self._penalties.of(seq)

    def forget(self, seq: Sequence) -> None:
        """Optional: what is kept per sequence is bounded and only saves work."""
        self._histories.pop(id(seq), None)
        self._plain.pop(seq, None)
        self._penalties.forget(seq)

    def _adjusted(self, logits: Tensor, runs: list[_Run]) -> Tensor:
        assert sum(len(run.contexts) for run in runs) == len(logits)
        adjusted = [run for run in runs if _is_adjusted(run)]
        out = logits.clone() if adjusted else logits
        for run in adjusted:
            self._adjust(out[run.first : run.stop], run)
        return out

    def _adjust(self, rows: Tensor, run: _Run) -> None:
        """Bias, min_tokens, penalties and the grammar, in place."""
        params, vocab = run.seq.params, rows.shape[1]
        if params.logit_bias:
            ids = [token for token in params.logit_bias if token < vocab]
            rows[:, ids] += rows.new_tensor([params.logit_bias[token] for token in ids])
        early = [i for i, c in enumerate(run.contexts) if c.num_output < params.min_tokens]
        if early:
            for token in {*self.eos_ids, *params.stop_token_ids}:
                if token < vocab:
                    rows[early, token] = -torch.inf
        if params.repetition_penalty != 1.0:
            self._penalise_repetition(rows, run)
        if params.frequency_penalty or params.presence_penalty:
            self._penalise_counts(rows, run)
        if run.seq.constraint is not None:
            _constrain(rows, run.contexts, run.seq.constraint)

    def _penalise_repetition(self, rows: Tensor, run: _Run) -> None:
        """Divide positive logits of tokens seen so far, multiply others (arXiv:1909.05858)."""
        penalty = run.seq.params.repetition_penalty
        history = self._history(run.seq, like=rows)
        rows[:, history.seen_ids] = _repelled(rows[:, history.seen_ids], penalty)
        pairs = [
            (i, token)
            for i, context in enumerate(run.contexts)
            for token in dict.fromkeys(context.path)
            if token not in history.seen
        ]
        if pairs:
            index = _index(pairs, rows.device)
            rows[index] = _repelled(rows[index], penalty)

    def _penalise_counts(self, rows: Tensor, run: _Run) -> None:
        """Frequency per occurrence, presence once, over generated tokens and the row's path. What a
        path holds is counted anew from the plain logit: a token has the same value to the bit
        whether it is committed or only proposed."""
        params = run.seq.params
        history = self._history(run.seq, like=rows)
        pairs: list[tuple[int, int]] = []
        totals: list[int] = []
        for i, context in enumerate(run.contexts):
            for token in dict.fromkeys(context.path):
                pairs.append((i, token))
                totals.append(history.counts[token] + context.path.count(token))
        index = _index(pairs, rows.device)
        plain = rows[index]
        rows -= _count_penalty(history.count_row, params)
        rows[index] = plain - _count_penalty(rows.new_tensor(totals), params)

    def _history(self, seq: Sequence, *, like: Tensor) -> _History:
        history = self._histories.pop(id(seq), None)
        if history is None or not history.fits(seq, like=like):
            history = _History(seq, like=like)
            if len(self._histories) >= _MAX_HISTORIES:
                self._histories.popitem(last=False)
        self._histories[id(seq)] = history
        history.catch_up()
        return history


def _constrain(rows: Tensor, contexts: Seq[RowContext], constraint: Constraint) -> None:
    """What may not follow a row's path is removed, in place. A path that may not stand itself is
    never walked, so its row stays as it is."""
    for i, context in enumerate(contexts):
        allowed = constraint.allowed(context.path)
        if allowed is not None:
            flags = np.unpackbits(allowed, count=rows.shape[1], bitorder="little")
            rows[i].masked_fill_(torch.from_numpy(flags == 0).to(rows.device), -torch.inf)


def _index(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
    """(row, token) pairs as an index of a [rows, vocab] tensor."""
    return torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)


def _count_penalty(counts: Tensor, params: SamplingParams) -> Tensor:
    return counts * params.frequency_penalty + (counts > 0) * params.presence_penalty


def _repelled(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _runs(contexts: Seq[RowContext]) -> list[_Run]:
    runs: list[_Run] = []
    first = 0
    for _, group in groupby(contexts, key=lambda context: id(context.seq)):
        rows = list(group)
        runs.append(_Run(rows[0].seq, first, rows))
        first += len(rows)
    return runs


def _is_adjusted(run: _Run) -> bool:
    params = run.seq.params
    return bool(
        params.logit_bias
        or is_penalised(params)
        or run.seq.num_output < params.min_tokens
        or run.seq.constraint is not None
    )


def _is_filtered(params: SamplingParams) -> bool:
    """At temperature 0 the most likely token is kept by every filter."""
    return params.temperature > 0 and bool(
        params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0
    )


def _temper(logits: Tensor, runs: list[_Run]) -> Tensor:
    """Scale by 1 / temperature; 0 (greedy) and 1 leave a row as it is, to the bit."""
    scales = [scale_at(run.seq.params.temperature) for run in runs]
    if len(set(scales)) == 1:
        return logits if scales[0] == 1.0 else logits * scales[0]
    each = [s for s, run in zip(scales, runs, strict=True) for _ in run.contexts]
    column = torch.tensor(each, dtype=logits.dtype).to(logits.device, non_blocking=True)
    return logits * column.unsqueeze(1)


def _filter(logits: Tensor, runs: list[_Run]) -> Tensor:
    """top_k, top_p and min_p on the rows of these runs."""
    rows = [row for run in runs for row in range(run.first, run.stop)]
    params = [run.seq.params for run in runs for _ in run.contexts]
    index = None if len(rows) == len(logits) else torch.tensor(rows, device=logits.device)
    kept = keep_most_likely(
        logits if index is None else logits[index],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )
    return kept if index is None else logits.index_copy(0, index, kept)
