"""Heads in hindsight: what they would have proposed while K was 0, compared with the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.control.controller import Choice, FixedK, Load
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.scheduling.step_record import StepRecord
from engine.speculation.drafts import MOST_TREES
from engine.speculation.proposal import Proposal
from tests.model.test_eagle import watched
from tests.support import eagle, medusa

K, PROMPT = 4, [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]


class Late(FixedK):
    """K = 0 for `spell` steps, then 4; keeps the first `kept` nodes of each tree."""

    def __init__(self, spell: int, *, hindsight: bool = True, kept: int = K) -> None:
        super().__init__(K)
        self.spell, self.hindsight, self.kept, self.seen = spell, hindsight, kept, [StepRecord([])]

    def choose(self, load: Load) -> Choice:
        is_on = len(self.seen) > self.spell
        return Choice(K * is_on, "pays" if is_on else "off", uses_hindsight=self.hindsight)

    def kept_counts(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [min(len(own), self.kept) for own in confidences]

    def update(self, record: StepRecord) -> None:
        self.seen.append(record)


@pytest.fixture(scope="module")
def heads(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    auto: Any = AutoModelForCausalLM
    words = auto.from_pretrained(tiny_target, dtype=torch.float32).get_output_embeddings().weight
    folder: Path = tmp_path_factory.mktemp("heads")
    return {
        "medusa": medusa.save(medusa.random_heads(words), folder / "medusa"),
        "eagle": eagle.save(eagle.random_head(words), folder / "eagle"),
    }


def engine_with(kind: str, target: str, heads: dict[str, str], controller: FixedK) -> Engine:
    config = EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "cache": {"num_blocks": 128, "block_size": 4},
            "speculation": {"proposer": {"kind": kind, "path": heads[kind]}, "companions": []},
        }
    )
    return Engine(config, controller=lambda *_, **__: controller)


def run(engine: Engine, prompts: Sequence[list[int]], tokens: int, temperature: float) -> list[int]:
    """Return the first prompt's text."""
    fields: dict[str, Any] = {"seed": 3, "temperature": temperature, "ignore_eos": True}
    for i, prompt in enumerate(prompts):
        engine.add(Submit(str(i), prompt, SamplingParams(max_tokens=tokens, **fields), 0.0))
    text = list(prompts[0])
    while engine.has_work:
        text += [token for each in engine.step().items if each.id == "0" for token in each.tokens]
    return text


def proposed_after(
    text: list[int], ends: range, make: Any, temperature: float
) -> dict[int, Proposal]:
    """Return, by length, what a new request proposes after so much of the text."""
    engine = make(FixedK(K))
    seen = watched(engine)
    run(engine, [text[: end - 1] for end in ends], K + 2, temperature)
    return {len(own): proposal for _, own, _, proposal in seen if len(proposal) == K}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_agreements_are_what_eagle_proposes_afresh(
    temperature: float, tiny_target: str, heads: dict[str, str]
) -> None:
    """Law: after steps at K = 0, the first nodes of the latest trees are judged as if they had been
    proposed there, of consecutive rounds up to the last token. The text stays the same."""
    controller, spell = Late(7), 7

    def make(controller: FixedK) -> Engine:
        return engine_with("eagle", tiny_target, heads, controller)

    text = run(make(controller), [PROMPT, PROMPT[::-1]], 20, temperature)
    assert text == run(make(FixedK(0)), [PROMPT], 20, temperature)
    found = controller.seen[spell + 1].hindsight
    assert {each.request for each in found} == {0, 1}
    end = len(PROMPT) + spell
    fresh, at = (
        proposed_after(text, range(end - MOST_TREES, end), make, temperature),
        end - MOST_TREES,
    )
    for [(sure, hit)], position in ((e.compared, e.position) for e in found if e.request == 0):
        assert len(PROMPT) + position == at
        assert hit == (fresh[at].tokens[0] == text[at])
        assert sure == pytest.approx(fresh[at].confidences[0], abs=1e-3)
        at += 1 + hit
    assert at >= end


def test_eagle_is_not_judged_unless_the_controller_learns_from_it(
    tiny_target: str, heads: dict[str, str]
) -> None:
    controller = Late(5, hindsight=False)
    run(engine_with("eagle", tiny_target, heads, controller), [PROMPT], 16, 0.0)
    assert not any(record.hindsight for record in controller.seen)


def test_a_missing_state_says_nothing_about_the_heads(
    tiny_target: str, heads: dict[str, str]
) -> None:
    """Bug: after steps at K = 0 Medusa has no state for one step, and its empty proposals counted
    as an inability to propose: with several streams each probe was such a step."""
    controller = Late(5, hindsight=False)
    run(engine_with("medusa", tiny_target, heads, controller), [PROMPT, PROMPT[1:]], 16, 0.0)
    without_state, *others = controller.seen[6:9]
    assert without_state.k == 0
    assert not without_state.outcomes
    for record in others:
        assert [outcome.offered for outcome in record.outcomes] == [K, K]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_nodes_left_out_of_the_forward_are_judged(
    kind: str, tiny_target: str, heads: dict[str, str]
) -> None:
    """Bug: of a tree only the verified nodes counted, which are those with the highest confidences:
    nodes at these places seemed to be accepted more often than they are."""
    controller = Late(0, kept=1)
    run(engine_with(kind, tiny_target, heads, controller), [PROMPT, PROMPT[::-1]], 24, 0.8)
    every = [outcome for record in controller.seen for outcome in record.outcomes]
    outcomes = [outcome for outcome in every if outcome.offered == K]
    assert sum(outcome.tried == K for outcome in outcomes) > 0.8 * len(outcomes)
    assert any(node > 0 for outcome in outcomes for node in outcome.path or ())
