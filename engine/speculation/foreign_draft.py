"""A draft model with a tokenizer of its own (token-level intersection, arXiv:2502.05202).

The draft reads committed text in its own tokens, so its KV has its own positions and blocks and
shares nothing with the target's prefix cache. It draws among the tokens that both vocabularies
have, by the target's ids and with their noise, so it is coupled to the target's draws like any
other draft.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from engine.model.runner import ForeignRunner, ModelOutput, ModelRunner
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.drafts import MOST_ROWS, Draft, rows_to_compare


@dataclass(slots=True)
class DraftTokens:
    """A sequence in the draft's tokens. KV is computed for the first `valid` of `ids` and, if all
    are valid, for the `drafted` tokens after them."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # number of `ids` up to each target position
    valid: int = 0
    drafted: list[int] = field(default_factory=list)
    blocks: array[int] = field(default_factory=lambda: array("i"))

    def follow(self, tokens: Seq[int], pieces: Callable[[int], list[int]]) -> None:
        """Append newly committed tokens. Drafted tokens that turned out right stay computed."""
        first = len(self.ids)
        for token in tokens[len(self.ends) :]:
            self.ids += pieces(token)
            self.ends.append(len(self.ids))
        if self.valid == first:
            for drafted, token in zip(self.drafted, self.ids[first:], strict=False):
                if drafted != token:
                    break
                self.valid += 1
        self.drafted = []


class ForeignDraftProposer(DraftModelProposer):
    """Assigns the blocks of the draft's plane. Proposes nothing for a sequence that gets no blocks
    or is too long for the draft."""

    def use(self, runner: ModelRunner) -> None:
        assert isinstance(runner, ForeignRunner)
        super().use(runner)
        translation, model = runner.translation, runner.model
        self._pieces, self._most = translation.pieces, model.max_model_len
        self._to = torch.tensor(translation.target_ids, device=model.device)
        self._from = torch.tensor(translation.draft_ids, device=model.device)
        self._free, self._block_size = list(runner.blocks), runner.block_size
        self._readings: dict[int, DraftTokens] = {}

    def forget(self, seq: Sequence) -> None:
        reading = self._readings.pop(id(seq), None)
        if reading is not None:
            self._free += reading.blocks

    def _ready(self, drafts: list[Draft]) -> list[Draft]:
        return [draft for draft in super()._ready(drafts) if self._fits(draft)]

    def _fits(self, draft: Draft) -> bool:
        """Whether the next tokens to read have positions; if so, allocates their blocks."""
        reading = self._readings.setdefault(id(draft.seq), DraftTokens())
        if not draft.run:
            reading.follow(draft.seq.tokens, self._pieces)
        length = len(reading.ids) + len(reading.drafted) + len(self._new(draft))
        if not 0 < length <= self._most:
            return False
        missing = -(-length // self._block_size) - len(reading.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            reading.blocks.append(self._free.pop())
        return True

    def _new(self, draft: Draft) -> list[int]:
        """Return the proposed tokens that the draft model has not run, in its own tokens."""
        return [piece for token in draft.tokens[draft.run :] for piece in self._pieces(token)]

    def _catch_up(self, drafts: list[Draft]) -> tuple[ModelOutput, list[int]]:
        segments, counts, rows = list[Segment](), list[int](), list[int]()
        compares, self.catch_up_rows, before = self._compares(), 0, 0
        for draft in drafts:
            reading, new = self._readings[id(draft.seq)], self._new(draft)
            ids, ends = reading.ids, reading.ends
            start = min(reading.valid, len(ids) + len(new) - 1)
            self.catch_up_rows += max(len(ids) - 1 - start, 0)
            first = bisect_left(ends, max(reading.valid, len(ids) - MOST_ROWS) + 1)
            count = rows_to_compare(draft, first, self._vocab_size, len(drafts)) if compares else 0
            counts.append(count)
            read = ends[-1 - count :]  # after each of these pieces, the draft proposes a token
            rows += [before + end - read[0] for end in read]
            num_logits = 1 + read[-1] - read[0]
            before += num_logits
            segments.append(Segment(ids[start:] + new, start, reading.blocks, num_logits))
            reading.valid, reading.drafted = len(ids), new
            draft.run = len(draft.tokens)
        output = self._run(segments)
        return ModelOutput(output.logits, rows) if any(counts) else output, counts

    def _extend(self, drafts: list[Draft]) -> ModelOutput:
        segments: list[Segment] = []
        for draft in drafts:
            reading, new = self._readings[id(draft.seq)], self._new(draft)
            start = len(reading.ids) + len(reading.drafted)
            reading.drafted += new
            if not new:  # they have no pieces: run the last piece again
                new, start = (reading.drafted or reading.ids)[-1:], start - 1
            segments.append(Segment(new, start, reading.blocks, 1))
            draft.run = len(draft.tokens)
        return self._run(segments)

    def _forward(self, segments: list[Segment]) -> ModelOutput:
        """Return logits by the target's ids, -inf for tokens that the draft lacks."""
        logits = super()._forward(segments).logits
        found = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return ModelOutput(found.index_copy_(1, self._to, logits.index_select(1, self._from)))
