"""Medusa's proposals: the trees, the states they start from, and as many tokens per step as the
published algorithm gives."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ModelError
from engine.messages import SamplingParams, Submit
from engine.model.draws import Draws
from engine.model.pair import load_pair
from engine.sampling.plain import Rows
from engine.speculation.medusa import below_of, likeliest
from tests.support import medusa

PROMPTS = [[5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17], [7, 3, 99, 12]]
LENGTH = 20


@pytest.fixture(scope="module")
def heads(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tiny_target, dtype=torch.float32)
    words = model.get_output_embeddings().weight
    return medusa.save(medusa.random_heads(words), tmp_path_factory.mktemp("heads"))


def config_for(target: str, folder: str, k: int, **proposer: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "cache": {"num_blocks": 128},
            "speculation": {
                "proposer": {"kind": "medusa", "path": folder, **proposer},
                "companions": [],
                "controller": {"kind": "fixed", "k": k},
            },
        }
    )


def copied(heads: str, to: Path, **more: Any) -> str:
    """Copy heads to `to`, with `more` in their config.json, and return the folder."""
    shutil.copytree(heads, to, dirs_exist_ok=True)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return str(to)


def steps_of(engine: Engine, prompt: list[int], tokens: int) -> list[list[int]]:
    """Return the tokens of each step."""
    params = SamplingParams(seed=1, max_tokens=tokens, temperature=0, ignore_eos=True)
    engine.add(Submit("a", prompt, params, 0.0))
    found = []
    while engine.has_work:
        found += [output.tokens for output in engine.step().items if output.tokens]
    return found


def test_stored_states_are_in_the_memory_plan(
    tiny_target: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the hidden states that sequences keep between steps were in no plan."""
    monkeypatch.setattr("engine.model.memory.available_bytes", lambda: 1 << 40)
    engine = Engine(config := config_for(tiny_target, heads, 4))
    schedule, states = config.schedule, engine._proposer._main._states  # type: ignore[attr-defined]
    steps_of(engine, PROMPTS[0], 2)
    engine.add(Submit("b", PROMPTS[0], SamplingParams(seed=1, max_tokens=9), 0.0))
    engine.step()
    [(_, state)] = states.values()
    memory = engine.ready.memory
    positions = schedule.max_sequences + schedule.max_step_tokens
    assert memory["stored hidden states"] == positions * state.nbytes
    loaded = sum(size for name, size in memory.items() if name.startswith("weights of"))
    assert memory["limit"] == (1 << 40) + loaded


@pytest.mark.parametrize("given_by", ["speculation.proposer", "the heads"])
def test_tokens_of_each_step_are_the_published_algorithms(
    tiny_target: str, heads: str, given_by: str, tmp_path: Path
) -> None:
    """Law: with a tree of choices, each greedy step accepts what Medusa as published accepts
    (reimplemented in tests/support/medusa.py), so tokens per step are equal."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        tiny_target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    weights = medusa.read(heads)
    choices = [list(path) for path in medusa.CHOICES]
    own: dict[str, Any] = {"choices": choices}
    if given_by == "the heads":
        heads, own = copied(heads, tmp_path, medusa_choices=choices), {}
    engine = Engine(config_for(tiny_target, heads, len(choices), **own))
    kept = 0
    for prompt in PROMPTS:
        expected = medusa.greedy(model, weights, prompt, LENGTH, medusa.CHOICES)
        found = steps_of(engine, prompt, 1 + sum(map(len, expected)))
        assert found[0] == found[0][:1]  # the prompt's step has no state to draft from yet
        assert found[1:] == expected
        kept += sum(len(step) > 1 for step in expected)
    assert kept > 3


def test_fewer_heads_and_a_free_tree(tiny_target: str, heads: str, tmp_path: Path) -> None:
    """Law: `heads` bounds the depth of trees, also those of the heads' own choices; without
    choices, a tree has as many nodes as K."""
    deep = copied(heads, tmp_path, medusa_choices=[[0], [0, 0], [1], [0, 0, 0]])
    one = load_pair(config_for(tiny_target, deep, 12, heads=1)).heads
    assert one is not None
    assert one.choices == ((0,), (1,))
    for most in (1, 2):
        engine = Engine(config_for(tiny_target, heads, 12, heads=most))
        engine.add(Submit("a", PROMPTS[0], SamplingParams(seed=1, max_tokens=30), 0.0))
        proposed = [0]
        while engine.has_work:
            result = engine.step()
            proposed.append(result.metrics.num_proposed)
            assert not any(result.metrics.proposed_at[most:])
        assert max(proposed) == (8 if most == 1 else 12)  # eight tokens per head are considered


@pytest.mark.parametrize("choices", [None, [list(path) for path in medusa.CHOICES]])
def test_a_tree_needs_no_more_heads_than_nodes(
    tiny_target: str, heads: str, choices: list[list[int]] | None
) -> None:
    """Law: a tree of n nodes is the same whether or not the heads beyond the n-th are computed."""

    def found(k: int, least: int) -> list[list[int]]:
        engine = Engine(config_for(tiny_target, heads, k, choices=choices))
        proposer = engine._proposer._main
        draft, counts = proposer._draft, []  # type: ignore[attr-defined]

        def counted(seqs: Any, most: int) -> Any:
            tokens, logs = draft(seqs, max(most, least))
            counts.append(len(tokens[0]))
            return tokens, logs

        proposer._draft = counted  # type: ignore[attr-defined]
        steps = steps_of(engine, PROMPTS[0], 30)
        assert max(counts) == min(max(k, least), 3)
        return steps

    for k in (1, 2):
        assert found(k, 0) == found(k, 3)


def test_without_draft_tokens_no_state_is_kept(tiny_target: str, heads: str) -> None:
    """Bug: at K = 0 each step copied a hidden state that nothing read, a tenth of a small step.
    After K rises, draft tokens begin one step later, from the state at the end of this text."""
    engine = Engine(config_for(tiny_target, heads, 4))
    engine.set_speculation("off", 0)
    params = SamplingParams(seed=1, max_tokens=LENGTH, temperature=0, ignore_eos=True)
    engine.add(Submit("a", PROMPTS[0], params, 0.0))
    counts = []
    for step in range(8):
        if step == 5:
            engine.set_speculation("fixed", 4)
        counts.append(engine.step().metrics.num_proposed)
        if step == 4:
            main: Any = engine._proposer._main
            assert not main._states
    assert counts[:6] == [0] * 6
    assert min(counts[6:]) > 0


def test_the_first_nodes_are_the_likeliest_tree() -> None:
    """Law: for every n, the first n nodes have the largest sum of probabilities of all trees of n
    nodes; with choices, of the trees that these allow."""
    rng = random.Random(3)
    for _ in range(20):
        logs = [sorted((math.log(rng.random()) for _ in range(4)), reverse=True) for _ in range(3)]
        paths = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
        sums = {path: sum(logs[h][r] for h, r in enumerate(path)) for path in paths}
        found = likeliest(logs, 12)
        assert list(found.values()) == pytest.approx(sorted(sums.values(), reverse=True)[:12])
        assert all(path[:-1] in found or len(path) == 1 for path in found)
        allowed = likeliest(logs, 99, below_of(medusa.CHOICES))
        assert set(allowed) == set(medusa.CHOICES)
        assert list(allowed.values()) == sorted(allowed.values(), reverse=True)


def test_draft_tokens_share_the_noise_of_their_positions(tiny_target: str, heads: str) -> None:
    """Law: at temperature 1 a head samples with the noise that the target uses, so far more draft
    tokens are accepted than with independent noise, which gets less than half as many."""

    def kept(shift: int) -> float:
        engine = Engine(config_for(tiny_target, heads, 1))
        proposer = engine._proposer._main
        draft = proposer._draft  # type: ignore[attr-defined]
        proposer._draft = lambda seqs, k: draft([_Elsewhere(seq, shift) for seq in seqs], k)  # type: ignore[attr-defined]
        for number in range(24):
            params = SamplingParams(seed=number, max_tokens=24, ignore_eos=True)
            engine.add(Submit(str(number), PROMPTS[number % 2], params, 0.0))
        last = []
        while engine.has_work:
            last += [output for output in engine.step().items if output.finish is not None]
        return sum(o.accepted for o in last) / sum(o.proposed for o in last)

    assert kept(0) > 1.5 * kept(1000)


class _Elsewhere:
    """A sequence that pretends to be some tokens longer."""

    def __init__(self, seq: Any, shift: int) -> None:
        self._seq, self._shift = seq, shift

    @property
    def num_tokens(self) -> int:
        return int(self._seq.num_tokens + self._shift)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seq, name)

    def __hash__(self) -> int:
        return hash(self._seq)

    def __eq__(self, other: object) -> bool:
        return bool(self._seq == other)


def test_heads_of_another_target_are_refused_at_start(
    tiny_target: str, heads: str, tmp_path: Path
) -> None:
    """Law: a wrong vocabulary or width, or choices deeper than there are heads, stop the start."""
    other = medusa.save(medusa.random_heads(torch.zeros(100, 48)), tmp_path)
    with pytest.raises(ModelError, match=r"vocabulary of 128 and its width of 48"):
        load_pair(config_for(tiny_target, other, 3))
    deep = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(ModelError, match=r"choices has a path of 4 ranks; .* are 3"):
        load_pair(config_for(tiny_target, heads, 3, choices=deep))


class Recording:
    """Draws as `inner` does, and records what was requested."""

    def __init__(self, inner: Draws) -> None:
        self.inner, self.requested = inner, list[Rows]()

    def draw(self, logits: Any, batch: list[Rows]) -> Any:
        self.requested += batch
        return self.inner.draw(logits, batch)


def test_nothing_is_drawn_behind_a_wrong_draft_token(tiny_target: str, heads: str) -> None:
    """Bug: the sampler did not know the draft tokens, so it also drew the target's token after
    wrong draft tokens, at the row of every node, which only lookahead needs."""
    engine = Engine(config_for(tiny_target, heads, 6))
    recording = Recording(engine._acceptor._draws)
    engine._acceptor._draws = recording  # type: ignore[assignment]
    steps_of(engine, PROMPTS[0], LENGTH)
    trees = [rows for rows in recording.requested if rows.size > 1]
    assert trees
    assert all(len(rows.draft_tokens) == rows.size - 1 for rows in trees)
