"""Which rows are redrawn on the exact path: only those of undecided sequences; texts stay equal."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu.draws import QuickDraws
from engine.messages import SamplingParams
from engine.model.runner import ModelOutput
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import UNDECIDED
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.proposal import Proposal
from engine.step.acceptance import Acceptor, Sampled

VOCAB, PROMPT, NUM_DRAFT_TOKENS = 300, [1, 2, 3, 4, 5], 3
IDS = ("a", "b", "c", "d")
PENALTY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
}  # makes the draws adjusted ones


class Doubting(QuickDraws):
    """Is undecided about the last row of the given sequences, besides real doubts."""

    def __init__(self, processor: LogitsProcessor, doubted: Collection[str]) -> None:
        super().__init__(processor, VOCAB)
        self._doubted = doubted

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        drawn = super().draw_adjusted(logits, contexts)
        last = {context.seq.id: i for i, context in enumerate(contexts)}
        for id in self._doubted:
            drawn[last[id]] = UNDECIDED
        return drawn


class Exact(DeviceDraws):
    """Counts the rows that are drawn on the exact path, by sequence."""

    def __init__(self, processor: LogitsProcessor) -> None:
        super().__init__(processor, VOCAB, torch.device("cpu"))
        self.rows: dict[str, int] = {}

    def takes(self, seq: Sequence) -> bool:
        return False

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        assert len(logits) == len(contexts)
        for context in contexts:
            self.rows[context.seq.id] = self.rows.get(context.seq.id, 0) + 1
        return super().draw_adjusted(logits, contexts)


def plan_of(draft_tokens: dict[str, list[int]]) -> tuple[StepPlan, list[Proposal]]:
    chunks = []
    for number, id in enumerate(draft_tokens):
        params = SamplingParams(seed=number, max_tokens=50, **PENALTY)
        seq = Sequence(id, params, list(PROMPT), len(PROMPT))
        chunks.append(Chunk(seq, len(PROMPT) - 1, 1, NUM_DRAFT_TOKENS))
    proposals = [
        Proposal(tokens, [-1, *range(len(tokens) - 1)], "draft_model")
        for tokens in draft_tokens.values()
    ]
    return StepPlan(chunks), proposals


def accepted(
    logits: ModelOutput, draft_tokens: dict[str, list[int]], doubted: Collection[str] | None
) -> tuple[list[Sampled], dict[str, int]]:
    """Return the accepted tokens and the rows drawn on the exact path; `doubted` None: all rows."""
    processor = LogitsProcessor([0])
    exact = Exact(processor)
    draws = exact if doubted is None else Doubting(processor, doubted)
    acceptor = Acceptor(draws, exact, eos_ids=[0], room=lambda seq: 40)
    return acceptor.accept(*plan_of(draft_tokens), logits), exact.rows


@pytest.fixture(scope="module")
def logits() -> ModelOutput:
    generator = np.random.default_rng(4)
    size = (len(IDS) * (1 + NUM_DRAFT_TOKENS), VOCAB)
    return ModelOutput((generator.standard_normal(size) * 4).astype(np.float32))


@pytest.fixture(scope="module")
def draft_tokens(logits: ModelOutput) -> dict[str, list[int]]:
    """Return two right draft tokens per sequence and one that is most likely wrong."""
    found = {id: [7] * NUM_DRAFT_TOKENS for id in IDS}
    for depth in range(2):
        for item in accepted(logits, found, None)[0]:
            found[item.chunk.seq.id][depth] = item.tokens[depth]
    return found


@pytest.mark.parametrize("doubted", [(), ("a",), ("c",), ("b", "d"), IDS], ids=str)
def test_only_undecided_rows_take_the_exact_path(
    doubted: tuple[str, ...], logits: ModelOutput, draft_tokens: dict[str, list[int]]
) -> None:
    """Bug: one undecided row sent the adjusted rows of the whole batch to the exact path. Law: the
    accepted tokens are the same, whichever rows are undecided."""
    every, all_rows = accepted(logits, draft_tokens, None)
    assert all_rows == dict.fromkeys(IDS, 1 + NUM_DRAFT_TOKENS)
    some, rows = accepted(logits, draft_tokens, doubted)
    assert rows == dict.fromkeys(doubted, 1)
    assert [item.chunk.seq.id for item in some] == list(IDS)
    assert [item.tokens for item in some] == [item.tokens for item in every]
    assert [item.path for item in some] == [item.path for item in every]
    assert all(item.num_accepted >= 2 for item in some)
