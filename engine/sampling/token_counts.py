"""Token counts and biases of texts on the device: penalties, logit_bias and min_tokens without
waiting for the host.

A sequence that needs these has a slot, updated by the tokens committed since its last use. A step's
draft tokens are counted only in `adjusted`, which applies all three and returns the results of
`logits.LogitsProcessor.adjust` bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampling.noise import Numbers
from engine.sampling.plain import ENDS, GENERATED, PROMPT
from engine.sampling.triton_draws import adjust, has_kernels
from engine.scheduling.sequence import Sequence

Counts = tuple[Tensor, Tensor]  # TokenCounts.seen and biases, or some slots of them


def bytes_of(sequences: int, vocab_size: int) -> int:
    """Return the bytes of TokenCounts for so many sequences."""
    return (sequences + 1) * vocab_size * 8


class CountSlots(NamedTuple):
    """Sequences' `slots`, int64 `[sequences]`, and the `counts` that they index, on the device."""

    slots: Tensor
    counts: Counts


class TokenCounts:
    """`seen` int32 and `biases` float32 `[sequences + 1, vocab]`, for at most `sequences` per call:
    for each id a sum of marks (see plain), and the bias of its logit. `eos_ids` end every sequence.
    The least recently used slot is reused; slot 0 is always empty. Allocated at first use, in the
    size of `bytes_of`."""

    def __init__(
        self, vocab_size: int, eos_ids: Collection[int], device: torch.device, sequences: int
    ) -> None:
        self._vocab, self._eos_ids, self._device = vocab_size, eos_ids, device
        self._held: OrderedDict[Sequence, tuple[int, int]] = OrderedDict()  # (slot, counted length)
        self._sequences = sequences
        self._allocate(0)

    def _allocate(self, slots: int) -> None:
        self.seen = torch.zeros(slots, self._vocab, dtype=torch.int32, device=self._device)
        self.biases = torch.zeros(slots, self._vocab, dtype=torch.float32, device=self._device)

    def updates(self, seqs: Seq[Sequence]) -> tuple[list[int], list[Numbers]]:
        """Return the slots of these sequences, and the arguments of `write` that update them."""
        assert len(seqs) <= self._sequences
        if seqs and not len(self.seen):
            self._allocate(self._sequences + 1)
        adds, biases, slots = _Entries(), _Entries(), list[int]()
        for seq in seqs:
            if seq in self._held:
                self._held.move_to_end(seq)
        for seq in seqs:
            if seq not in self._held:
                self._held[seq] = self._free_slot(), seq.num_prompt
                self._enter(seq, adds, biases)
            slot, length = self._held[seq]
            slots.append(slot)
            if new := seq.tokens[length:]:
                adds.put(slot * self._vocab, new, [GENERATED] * len(new))
                self._held[seq] = slot, len(seq.tokens)
        return slots, [*adds.arrays(), *biases.arrays()]

    @property
    def tables(self) -> Counts:
        return self.seen, self.biases

    def write(self, indices: Tensor, adds: Tensor, biased: Tensor, biases: Tensor) -> None:
        """Apply the result of `updates`, once it is on the device."""
        if len(indices):
            self.seen.view(-1).index_add_(0, indices, adds.int())
        if len(biased):
            self.biases.view(-1).index_copy_(0, biased, biases.float())

    def _free_slot(self) -> int:
        if len(self._held) + 1 < len(self.seen):
            return len(self._held) + 1
        _, (slot, _) = self._held.popitem(last=False)
        self.seen[slot].zero_()
        self.biases[slot].zero_()
        return slot

    def _enter(self, seq: Sequence, adds: _Entries, biases: _Entries) -> None:
        first, params = self._held[seq][0] * self._vocab, seq.params
        prompt = list(set(seq.tokens[: seq.num_prompt]))
        adds.put(first, prompt, [PROMPT] * len(prompt))
        ends = [t for t in {*self._eos_ids, *params.stop_token_ids} if t < self._vocab]
        adds.put(first, ends, [ENDS] * len(ends))
        biased = [token for token in params.logit_bias if token < self._vocab]
        biases.put(first, biased, [params.logit_bias[token] for token in biased])


class _Entries:
    """Numbers, and the flat indices to write them to."""

    def __init__(self) -> None:
        self._indices, self._numbers = list[int](), list[float]()

    def put(self, first: int, ids: Seq[int], numbers: Seq[float]) -> None:
        self._indices += [first + token for token in ids]
        self._numbers += numbers

    def arrays(self) -> tuple[Numbers, Numbers]:
        return np.array(self._indices, np.int64), np.array(self._numbers, np.float64)


def adjusted(logits: Tensor, tables: Counts, fields: Tensor, ids: Tensor, most: int) -> Tensor:
    """Return float32 `[rows, vocab]` logits after logit_bias, min_tokens and penalties, in that
    order. `fields` `[rows, Adjustments]`; the draft tokens before a row, at most `most` of `ids`
    (int64), count as generated. A row with slot 0 stays unchanged."""
    if has_kernels(logits.device):
        return adjust(logits, *tables, fields, ids)
    slots, first, depths, early, repetition, frequency, presence = torch.split(fields, 1, dim=1)
    seen, biases = (each.index_select(0, slots[:, 0].long()) for each in tables)
    if most:
        steps = torch.arange(most, device=seen.device)
        drafted = ids[(first.long() + steps).clamp(max=len(ids) - 1)]
        seen.scatter_add_(1, drafted, (steps < depths).int() * GENERATED)
    logits = logits + biases
    logits = logits.masked_fill(((seen & ENDS) > 0) & (early > 0), -torch.inf)
    repeated = logits / repetition.float(), logits * repetition.float()
    logits = torch.where(logits > 0, *repeated).where((seen & ~ENDS) > 0, logits)
    counts = (seen >> 2).float()
    return logits - (counts * frequency.float() + (counts > 0) * presence.float())
