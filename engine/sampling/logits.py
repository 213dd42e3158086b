"""Applies sampling fields to rows of logits before a token is drawn from them.

Order, as in vLLM and transformers: logit_bias, min_tokens, repetition penalty, frequency and
presence penalties, grammar; then, when tokens are drawn (`device_draws`), temperature, top_k,
top_p, min_p. Removed ids get -inf.

A row of the result depends only on that row's logits and context, bit for bit on the CPU. The given
logits are never written to.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.penalties import Penalties, PenaltyTables, is_penalised
from engine.sampling.plain import Plain, plain_of
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class RowContext:
    """The text before a row of logits: the committed tokens of `seq`, then `path`, the draft tokens
    up to this row (empty for the root)."""

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

    @property
    def is_adjusted(self) -> bool:
        """Whether any field but temperature and filters applies."""
        seq, params = self.seq, self.seq.params
        early = self.num_output < params.min_tokens
        constrained = seq.constraint is not None
        return bool(params.logit_bias) or early or constrained or is_penalised(params)


class LogitsProcessor:
    """Until `min_tokens`, `eos_ids` and the request's stop_token_ids are removed."""

    def __init__(self, eos_ids: Collection[int]) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._fields: dict[Sequence, Plain] = {}
        self._plain: dict[Sequence, Plain | None] = {}  # see `plain`
        self._penalties = PenaltyTables()

    def adjust(self, logits: Tensor, contexts: Seq[RowContext]) -> Tensor:
        """Return float32 logits `[rows, vocab]` with all fields up to the grammar applied; one
        context per row. The other fields are in plain.plain_of the request. Returns `logits` itself
        if no field applies."""
        assert len(contexts) == len(logits)
        adjusted = [(row, each) for row, each in enumerate(contexts) if each.is_adjusted]
        if not adjusted:
            return logits
        out = logits.clone()
        vocab = out.shape[1]
        for row, context in adjusted:
            params = context.seq.params
            if params.logit_bias:
                ids = [token for token in params.logit_bias if token < vocab]
                out[row, ids] += out.new_tensor([params.logit_bias[token] for token in ids])
            if context.num_output < params.min_tokens:
                ends = {*self.eos_ids, *params.stop_token_ids}
                out[row, [token for token in ends if token < vocab]] = -torch.inf
        self._penalise(out, [each for each in adjusted if is_penalised(each[1].seq.params)])
        for row, context in adjusted:
            _constrain(out[row], context)
        return out

    def plain(self, seq: Sequence) -> Plain | None:
        """Return temperature and filters of the next rows of `seq`, or None if another field
        applies now or later."""
        if seq not in self._plain:
            adjusted = RowContext(seq, []).is_adjusted
            if adjusted and seq.params.min_tokens:  # not cached: min_tokens stops applying later
                return None
            self._plain[seq] = None if adjusted else self.fields(seq)
        return self._plain[seq]

    def fields(self, seq: Sequence) -> Plain:
        """Return temperature and filters of `seq`, whatever its other fields."""
        if seq not in self._fields:
            self._fields[seq] = plain_of(seq.params)
        return self._fields[seq]

    def penalised(self, seq: Sequence) -> tuple[Plain, Penalties] | None:
        """Return temperature, filters and penalties of the next rows of `seq` if penalties apply
        and no other field does, now or later; else None."""
        params = seq.params
        early = seq.num_output < params.min_tokens
        if early or params.logit_bias or seq.constraint is not None or not is_penalised(params):
            return None
        return plain_of(params), self._penalties.of(seq)

    def forget(self, seq: Sequence) -> None:
        """Drop what is cached for a sequence."""
        self._fields.pop(seq, None)
        self._plain.pop(seq, None)
        self._penalties.forget(seq)

    def _penalise(self, out: Tensor, rows: Seq[tuple[int, RowContext]]) -> None:
        """Apply penalties in place. Repetition (arXiv:1909.05858) divides positive logits of all
        tokens so far and multiplies others; frequency counts generated tokens, presence counts each
        once. A token of the path gives the same result, bit for bit, as a committed one."""
        if not rows:
            return
        penalties = [self._penalties.of(context.seq, context.path) for _, context in rows]
        sizes = [len(each.table) for each in penalties]
        table = np.concatenate([each.table for each in penalties])
        factors = np.array([each[:3] for each in penalties], np.float32).repeat(sizes, axis=0)
        indices = np.stack([np.repeat([row for row, _ in rows], sizes), table[:, 0]])
        numbers = np.concatenate([factors.T, table[None, :, 1]]).astype(np.float32)
        at, id = torch.from_numpy(indices).to(out.device, non_blocking=True)
        columns = torch.from_numpy(numbers).to(out.device, non_blocking=True)
        repetition, frequency, presence, count = columns
        logits = out[at, id]
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        out[at, id] = logits - (count * frequency + (count > 0) * presence)


def _constrain(row: Tensor, context: RowContext) -> None:
    """Remove, in place, the tokens that the grammar forbids next. If `path` itself is forbidden,
    the row is never reached and stays unchanged."""
    constraint = context.seq.constraint
    allowed = None if constraint is None else constraint.allowed(context.path)
    if allowed is not None:
        flags = np.unpackbits(allowed, count=len(row), bitorder="little")
        row.masked_fill_(torch.from_numpy(flags == 0).to(row.device), -torch.inf)
