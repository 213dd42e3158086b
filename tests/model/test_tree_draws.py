"""A node of a tree draws exactly what a chain along its path draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu.draws import QuickDraws
from engine.messages import SamplingParams
from engine.sampling.device_draws import DeviceDraws, Drawn
from engine.sampling.logits import LogitsProcessor
from engine.sampling.plain import Rows
from engine.scheduling.segment import ancestors_of
from engine.scheduling.sequence import Sequence
from engine.speculation.proposal import Proposal
from engine.speculation.verify import walk

VOCAB, NODES, PROMPT = 500, 14, 5
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.1},
]  # fmt: skip
MORE: list[dict[str, Any]] = [
    {"logprobs": 2}, {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 0},
    {"repetition_penalty": 1.7, "top_p": 0.9}, {"frequency_penalty": -2.0},
    {"logit_bias": {3: 4.0}, "min_tokens": 3, "stop_token_ids": (5, 9, 77)},
]  # fmt: skip


def tree(seed: int) -> list[int]:
    """Return the parents of random nodes."""
    generator = np.random.default_rng(seed)
    return [int(generator.integers(-1, node)) if node else -1 for node in range(NODES)]


def sequence(seed: int, **fields: Any) -> Sequence:
    params = SamplingParams(seed=seed, max_tokens=99, **fields)
    return Sequence(f"{seed}", params, list(range(PROMPT)), PROMPT)


def peaked(rows: int, seed: int) -> Tensor:
    """Return logits with few likely ids, so that draft tokens of these ids affect penalties."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, 20:32] += 6
    return logits


def paths(parents: list[int]) -> list[list[int]]:
    """Return, for each row, the rows from the root's to it."""
    above = ancestors_of(parents)
    return [[0], *([0, *(1 + i for i in own), 1 + node] for node, own in enumerate(above))]


def along(draws: DeviceDraws, logits: Tensor, rows: Rows, path: list[int]) -> Drawn:
    """Draw the tree's rows along `path` as a chain."""
    draft_tokens = [rows.draft_tokens[row - 1] for row in path[1:]]
    chain = Rows(rows.seq, 0, len(path), rows.position, draft_tokens)
    own = logits[[rows.first + row for row in path]].contiguous()
    return draws.draw(own, [chain])[0]


@pytest.mark.parametrize("fields", [*PLAIN, *MORE], ids=str)
def test_a_node_on_the_device_draws_what_a_chain_draws(fields: dict[str, Any]) -> None:
    """Law: under every field, beside a chain and another tree in one call."""
    draws = DeviceDraws(LogitsProcessor([0]), VOCAB, torch.device("cpu"))
    logits, batch = peaked(2 * (NODES + 1) + 3, 4), list[Rows]()
    for i in range(2):
        draft_tokens = np.random.default_rng(i).integers(20, 32, NODES).tolist()
        first, seq = i * (NODES + 4), sequence(i, **fields)
        batch.append(Rows(seq, first, NODES + 1, PROMPT, draft_tokens, tree(i)))
    batch.insert(1, Rows(sequence(7, **fields), NODES + 1, 3, PROMPT, [21, 22]))
    found = draws.draw(logits, batch)
    differing = 0
    for rows, (tokens, logprobs) in zip(batch, found, strict=True):
        assert tokens is not None
        for row, path in enumerate(paths(list(rows.parents or range(-1, rows.size - 2)))):
            expected = along(draws, logits, rows, path)
            assert expected.tokens is not None
            assert tokens[row] == expected.tokens[-1]
            assert (logprobs is None) == (expected.logprobs is None)
            if logprobs is not None and expected.logprobs is not None:
                assert logprobs[row] == expected.logprobs[-1]
        differing += len(set(tokens))
    assert differing > 8  # rows differ


@pytest.mark.parametrize("fields", PLAIN, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_compiled_draws_go_down_a_tree(fields: dict[str, Any], seed: int) -> None:
    """Law: along the drawn path, every row equals the device's draw; no row after a draft token
    that was not drawn is read; without draft tokens all rows are drawn, each at its depth."""
    processor, parents = LogitsProcessor([0]), tree(seed)
    quick, device = QuickDraws(processor, VOCAB), DeviceDraws(processor, VOCAB, torch.device("cpu"))
    logits, seq = peaked(NODES + 1, seed), sequence(seed, **fields)
    [[expected, _]] = device.draw(logits, [Rows(seq, 0, NODES + 1, PROMPT, [0] * NODES, parents)])
    assert expected is not None
    [every] = quick.draw(logits.numpy(), [Rows(seq, 0, NODES + 1, PROMPT, (), parents)])
    assert every == expected
    # At each depth one right node and some wrong ones.
    draft_tokens = [expected[1 + above] if node % 3 else 499 for node, above in enumerate(parents)]
    logits[[row for row in range(1, NODES + 1) if draft_tokens[row - 1] == 499]] = torch.nan
    rows = Rows(seq, 0, NODES + 1, PROMPT, draft_tokens, parents)
    [found] = quick.draw(logits.numpy(), [rows])
    assert found is not None
    assert min(found) >= 0
    proposal = Proposal(draft_tokens, parents, "test")
    one, other = walk(proposal, found), walk(proposal, expected)
    assert (one.path, one.tokens) == (other.path, other.tokens)
