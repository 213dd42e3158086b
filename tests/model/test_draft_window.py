"""A draft that attends only to its last tokens, on every path that a forward can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention.flashinfer import FlashInferBackend
from engine.config import AttentionName
from engine.messages import SamplingParams
from engine.model.chain_graphs import read_chains
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.runner import Graphs, ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor
from engine.sampling.plain import Rows, plain_of
from engine.scheduling.segment import Segment, Start, Window
from engine.scheduling.sequence import Sequence as Text
from tests.support import tiny
from tests.support.fake_flashinfer import PagedPrefill
from tests.support.fake_recorder import FakeRecorder

CPU = torch.device("cpu")
BLOCK, WINDOW, LENGTH = 4, 6, 40
BLOCKS = [11, 3, 4, 29, 8, 17, 1, 30, 22, 14, 6, 7, 25]
TOKENS = [(29 * i * i + 7 * i) % 128 for i in range(LENGTH)]
GREEDY = SamplingParams(seed=1, max_tokens=9, temperature=0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Load a draft whose weights are exact in bfloat16, so that compiled code runs it."""
    shape = {**tiny.GROUPED, "head_dim": 32, "initializer_range": 0.3}
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    folder = tmp_path_factory.mktemp("draft")
    return load_model(tiny.save(model, folder), role="draft", device="cpu", dtype="float32")


def _seen(row: int) -> list[int]:
    """Return the keys that a row sees when it runs alone, as the configuration defines them."""
    first = (row - WINDOW) // BLOCK * BLOCK  # start of the block with the window's first token
    return [key for key in range(row + 1) if key < BLOCK or key >= first]


@pytest.fixture(scope="module")
def expected(draft: LoadedModel) -> Tensor:
    """Return logits `[LENGTH, vocab]` of transformers alone, with a mask built here."""
    mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min)
    for row in range(LENGTH):
        mask[0, 0, row, _seen(row)] = 0.0
    model: Any = LlamaForCausalLM.from_pretrained(draft.path, attn_implementation="eager")
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([TOKENS]), attention_mask=mask).logits[0]
    return found


def _runner(draft: LoadedModel, way: str) -> ModelRunner:
    model, more = draft, dict[str, Any]()
    if way != "compiled decoder":
        model = replace(draft, compiled=None)
    if way == "graphs":
        model = replace(model, logits=ModuleCall(model.model))
        more |= {
            "backend": FlashInferBackend(CPU, PagedPrefill),
            "graphs": Graphs(FakeRecorder(), 8, 4),
        }
    else:
        attention: AttentionName = "compiled" if way == "compiled" else "sdpa"
        more["attention"] = attention
    cache = KVCache(32, BLOCK, "cpu", padding_block=way == "graphs")
    return ModelRunner(model, cache, "draft", window=WINDOW, **more)


WAYS = ["compiled decoder", "compiled", "sdpa", "graphs"]


def _read(runner: ModelRunner, tokens: Sequence[int]) -> Tensor:
    rows = [
        runner.forward([Segment([token], at, BLOCKS, 1)]).logits.clone()
        for at, token in enumerate(tokens)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("way", WAYS)
def test_it_attends_to_the_window(way: str, draft: LoadedModel, expected: Tensor) -> None:
    """Law: a row's logits are those of transformers with a mask that shows only the first block and
    the blocks of the last tokens; positions are those of the whole text."""
    runner = _runner(draft, way)
    assert (way == "compiled decoder") == (runner._compiled is not None)
    found = _read(runner, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    whole = ModelRunner(replace(draft, compiled=None), KVCache(32, BLOCK, "cpu"), "draft")
    assert not torch.allclose(_read(whole, TOKENS)[-1], expected[-1], atol=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_tree_attends_to_the_window(way: str, draft: LoadedModel) -> None:
    """Law: a path of a tree has the logits of the same tokens as a chain."""
    runner = _runner(draft, way)
    _read(runner, TOKENS[:30])
    chain = runner.forward([Segment([5, 6, 7], 30, BLOCKS, 3)]).logits.clone()
    tree = Segment([5, 9, 6, 8, 7], 30, BLOCKS, 5, [-1, -1, 1, 1])  # after 5: 9 or 6, then 8 or 7
    found = runner.forward([tree]).logits
    torch.testing.assert_close(found[[0, 2, 4]], chain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["compiled decoder", "graphs"])
def test_a_chain_attends_to_the_window(way: str, draft: LoadedModel) -> None:
    """Law: draft tokens of one call equal those of single steps that use the window of the
    first."""
    runner, steps = _runner(draft, way), 4
    _read(runner, TOKENS[:33])
    output = runner.forward([Segment([TOKENS[33]], 33, BLOCKS, 1)])
    logits, start = output.logits.clone(), Start(BLOCKS, 34)
    if way == "graphs":
        text = Text("", GREEDY, TOKENS[:34], 34)
        draws = DeviceDraws(LogitsProcessor(()), draft.vocab_size, CPU)
        table = draws.plan([Rows(text, 0, steps, 34)]).table
        chains = runner.unseen_chain(output, [start], steps=[steps], table=table)
        [found], *_ = read_chains(chains.drawn.numpy(), 1)
    else:
        params = [(plain_of(GREEDY), None)]
        [found], *_ = runner.chain(output, [0], [start], steps=[steps], params=params)
    near = start.within(Window(WINDOW, BLOCK))
    assert near.left_out > 0
    stepwise, path = _runner(draft, "sdpa"), list[int]()
    _read(stepwise, TOKENS[:34])
    stepwise.window = None
    for step in range(steps):
        path.append(int(logits[0].argmax()))
        segment = Segment(path[-1:], 34 + step, near.blocks, 1, None, near.left_out)
        logits = stepwise.forward([segment]).logits.clone()
    assert found == path


def test_its_steps_do_not_grow_with_the_text(
    draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a step reads the same few keys, however long the text is."""
    runner, read = _runner(draft, "sdpa"), list[int]()
    prepare = runner.backend.prepare

    def spy(plane: Any, spans: Any) -> Any:
        read.append(max(span.end for span in spans))
        return prepare(plane, spans)

    monkeypatch.setattr(runner.backend, "prepare", spy)
    _read(runner, TOKENS)
    assert max(read) <= WINDOW + 2 * BLOCK
