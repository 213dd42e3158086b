"""The forwards of a draft model over its own plane: what is missing there, and what it guessed.

Moves `Sequence.num_draft_computed`, see `speculation.draft_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from engine.model.chain_graphs import Found
from engine.model.runner import ModelOutput
from engine.sampling.noise import Key
from engine.sampling.penalties import Penalties
from engine.sampling.plain import Plain
from engine.scheduling.segment import Segment, Start
from engine.speculation.drafts import Draft
from engine.speculation.hindsight import rows_to_judge


class Runner(Protocol):
    """What is needed of a model.runner.ModelRunner."""

    vocab_size: int

    @property
    def seconds(self) -> float: ...

    def forward(self, segments: Seq[Segment]) -> ModelOutput: ...

    def draws_chains(self, sequences: int) -> bool: ...

    def chain(
        self,
        output: ModelOutput,
        rows: Seq[int],
        starts: Seq[Start],
        *,
        steps: Seq[int],
        asked: Seq[tuple[Plain, Penalties | None]],
    ) -> Found: ...

    def keyed_chain(
        self,
        output: ModelOutput,
        starts: Seq[Start],
        *,
        steps: int,
        scales: Seq[float],
        keys: Callable[[], Seq[Key | None]],
    ) -> Found | None: ...

    def fits_chain(self, starts: Seq[Start], steps: int) -> bool: ...

    def unseen_chain(
        self,
        output: ModelOutput,
        starts: Seq[Start],
        *,
        steps: int,
        scales: Seq[float],
        keys: Seq[Key | None],
    ) -> Tensor: ...


class DraftForwards:
    """`vocab_size` is the target's; rows of the draft beyond it are cut off. `seconds` since they
    were last set to 0; `catch_up_rows` of the last `catch_up`. `hears`: as DraftModelProposer's."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        max_step_tokens: int,
        hears: Callable[[], bool] | None = None,
    ) -> None:
        assert max_step_tokens > 0
        self._hears = hears
        self.seconds, self.catch_up_rows = 0.0, 0
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens

    def catch_up(self, drafts: list[Draft]) -> tuple[ModelOutput, list[int]]:
        """Run every committed position that the plane lacks, and the guesses there are; of each one
        [rows to judge, and one more, vocab] logits, the last after its last token, and how many
        are to be judged. Long stretches go in several forwards."""
        found: list[ModelOutput] = []
        segments: list[Segment] = []
        room = self._max_step_tokens
        counts: list[int] = []
        judges = self._hears is None or self._hears()
        self.catch_up_rows = 0
        for draft in drafts:
            seq, end = draft.seq, len(draft.seq.tokens)
            start = min(seq.num_draft_computed, end - 1)
            self.catch_up_rows += end - 1 - start
            judged = judges and not draft.tokens
            counts.append(rows_to_judge(seq, start, draft.plain, len(drafts)) if judged else 0)
            tokens = seq.tokens[start:] + draft.tokens
            first, end, draft.run = start, end + len(draft.tokens), len(draft.tokens)
            silent = end - 1 - counts[-1]  # positions below it are not asked for logits
            while start < end:
                stop = min(start + room, end)
                some, asked = (
                    tokens[start - first : stop - first],
                    max(stop - max(start, silent), 0),
                )
                segments.append(Segment(self._known(some), start, seq.blocks, asked))
                room -= stop - start
                start = stop
                if room == 0:
                    found.append(self._forward(segments))
                    segments, room = [], self._max_step_tokens
            seq.num_draft_computed = end
        if segments:
            found.append(self._forward(segments))
        return self._fit(found), counts

    def extend(self, drafts: list[Draft]) -> ModelOutput:
        """Run the new guesses of each; [drafts, vocab] logits after the last of them."""
        found: list[ModelOutput] = []
        segments: list[Segment] = []
        room = self._max_step_tokens
        for draft in drafts:
            tokens = draft.tokens[draft.run :]
            if segments and len(tokens) > room:
                found.append(self._forward(segments))
                segments, room = [], self._max_step_tokens
            start = draft.seq.num_draft_computed
            segments.append(
                Segment(tokens=tokens, start=start, blocks=draft.seq.blocks, num_logits=1)
            )
            room -= len(tokens)
            draft.run += len(tokens)
            draft.seq.num_draft_computed += len(tokens)
        found.append(self._forward(segments))
        return self._fit(found)

    def _forward(self, segments: list[Segment]) -> ModelOutput:
        output = self._runner.forward(segments)
        self.seconds += self._runner.seconds
        return output

    def _known(self, tokens: list[int]) -> list[int]:
        """The draft's embedding ends before the target's where only the target's is padded; a
        prompt given as ids may hold such an id all the same."""
        if self._runner.vocab_size >= self._vocab_size:
            return tokens
        return [token if token < self._runner.vocab_size else 0 for token in tokens]

    def _fit(self, found: list[ModelOutput]) -> ModelOutput:
        """All of them, as wide as the target's vocabulary."""
        missing = self._vocab_size - self._runner.vocab_size
        if len(found) == 1 and not missing:
            return found[0]
        logits = torch.cat([output.logits for output in found])
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return ModelOutput(logits[:, : self._vocab_size])
