"""What the built-in draft learns from: the target's text, and a distance to the target."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import demo
from engine.demo.tokens import CONTEXT, Rows
from engine.lab.demo.card import agreement
from engine.lab.demo.distill import LENGTH, PROMPTS, ROWS, continued, mixed, written
from engine.lab.train.learning import Run, distance, fit, follow, optimizers_of
from engine.messages import SamplingParams
from tests.support.reference import Reference


def model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_loss_is_rejections_plus_divergence() -> None:
    """Law: the loss is the rejection rate of the best rule (card.py) plus a divergence."""
    target, draft = torch.randn(2, 120, 50, generator=torch.Generator().manual_seed(0))
    target, draft = 2 * target, target + draft
    refused = 1 - agreement(target, draft, 1.0).rejection
    goal, guess = target.log_softmax(-1), draft.log_softmax(-1)
    divergence = (goal.exp() * (goal - guess)).sum(-1).mean().item()
    assert distance(target, draft).item() == pytest.approx(refused + 0.3 * divergence, abs=1e-5)
    assert distance(target, target).item() == pytest.approx(0, abs=1e-5)


def test_the_target_continues_prompts_to_one_length(tiny_target: str) -> None:
    """Law: each row is a prompt and the target's continuation, which runs past ends of documents,
    whatever EOS the model's folder sets."""
    target, reference = model(tiny_target), Reference(tiny_target, [])
    prompts = torch.tensor([[1 + i, 2, 3] for i in range(5)])
    rows = continued(target, prompts, 24, temperature=0.0).tolist()
    params = SamplingParams(seed=0, max_tokens=21, temperature=0.0)
    texts = [reference.generate(prompt, params)[0] for prompt in prompts.tolist()]
    assert rows == [prompt + text for prompt, text in zip(prompts.tolist(), texts, strict=True)]
    target.generation_config.eos_token_id = texts[0][0]
    assert continued(target, prompts, 24, temperature=0.0).tolist() == rows


def test_a_temperature_draws_from_the_whole_distribution(tiny_target: str) -> None:
    """Law: not from the 50 likeliest tokens, which is the default of `generate`."""
    target = model(tiny_target)
    target.get_output_embeddings().weight.data.zero_()  # makes every token equally likely
    rows = continued(target, torch.ones(40, 1, dtype=torch.long), 11, temperature=1.0)
    assert len(set(rows[:, 1:].flatten().tolist())) > 100


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Return rows of small programs only, so that the library's files need not be read."""
    return Rows(
        AutoTokenizer.from_pretrained(Path(demo.__file__).parent / "target"), 0, {"programs": 1.0}
    )


def test_half_of_a_batch_is_written_text_and_all_of_it_comes_round(rows: Rows) -> None:
    """Law: the other batches are single rows of the whole context: serving uses its positions."""
    own = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH + 1) + 5000  # ids not in the corpus
    made = list(itertools.islice(mixed(own, rows), 5))
    batches = [batch for batch in made if len(batch) == ROWS]
    assert [batch.shape for batch in batches] == [(ROWS, LENGTH + 1)] * 4
    assert [batch.shape for batch in made if len(batch) != ROWS] == [(1, CONTEXT + 1)]
    for first, second in (batches[:2], batches[2:]):
        seen = torch.cat([first[: ROWS // 2], second[: ROWS // 2]])[:, 0].sort().values
        assert torch.equal(seen, own[:, 0])
    assert all(batch[ROWS // 2 :].max() < 4096 for batch in batches)


def test_some_text_is_written_however_little_time_there_is(
    monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    """Law: a slow machine distils less, but never stops because it has no batch."""
    shapes = []

    def zeros(_: Any, prompts: torch.Tensor, length: int, __: float) -> torch.Tensor:
        shapes.append(prompts.shape)
        return torch.zeros(len(prompts), length, dtype=torch.long)

    monkeypatch.setattr("engine.lab.demo.distill.continued", zeros)
    assert written(None, rows, 0, time.monotonic()).shape == (PROMPTS, LENGTH + 1)
    assert len(shapes) == 1


def test_a_draft_that_follows_comes_nearer_and_the_target_stays(
    tiny_target: str, tiny_draft: str
) -> None:
    """Law: this works for any two models of transformers that share a vocabulary."""
    torch.manual_seed(0)
    target, draft = model(tiny_target), model(tiny_draft)
    batch = torch.randint(0, target.config.vocab_size, (8, 33))

    def apart() -> float:
        with torch.no_grad():
            both = [of(batch).logits.flatten(0, 1) for of in (target, draft)]
        return distance(both[0], both[1]).item()

    before, weights = apart(), {name: w.clone() for name, w in target.state_dict().items()}
    counted = torch.ones_like(batch) > 0
    fit(
        lambda ids: follow(target, draft, ids, counted),
        optimizers_of(draft, scale=0.5),
        itertools.repeat(batch),
        Run(0, steps=60),
    )
    assert apart() < 0.9 * before
    assert all(torch.equal(weights[name], w) for name, w in target.state_dict().items())
