"""Lookahead decoding against a slow reference of the published algorithm; texts never change."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.model.pair import Pair, load_pair
from tests.model.test_lossless import PROMPT
from tests.support.reference_lookahead import Greedy, Lookahead

PROMPTS = [
    PROMPT,
    [9, 80, 33, 21, 77, 5, 60, 104, 18],
    [1, 2, 3],
    [64, 12, 99, 64, 12, 50, 64, 12, 99, 7, 31, 8, 64, 12],
    [7 * i % 128 for i in range(30)],
]
LENGTH = 48
SIZES = [(3, 4, 2), (4, 3, 3), (1, 2, 2), (2, 5, 1)]  # window, ngram, guesses


@pytest.fixture(scope="module")
def greedy(tiny_target: str) -> Greedy:
    return Greedy(tiny_target)


@pytest.fixture(scope="module")
def pair(tiny_target: str) -> Pair:
    return load_pair(lookahead(tiny_target))


def lookahead(path: str, *, k: int = 16, **sizes: int) -> EngineConfig:
    """Return a configuration with lookahead alone, and a K that fits everything."""
    return EngineConfig.model_validate(
        {
            "target": {"path": path},
            "device": "cpu",
            "cache": {"num_blocks": 64},
            "speculation": {
                "proposer": {"kind": "lookahead", **sizes},
                "controller": {"kind": "fixed", "k": k},
                "companions": [],
            },
        }
    )


def steps_of(engine: Engine, prompt: list[int], count: int) -> list[list[int]]:
    """Return the tokens of each step, while K has room to the end of the text."""
    params = SamplingParams(seed=1, max_tokens=count + 20, temperature=0, ignore_eos=True)
    engine.add(Submit("it", prompt, params, 0.0))
    found = list[list[int]]()
    while engine.has_work:
        found += [item.tokens for item in engine.step().items]
    return cut(found, count)


def cut(steps: list[list[int]], count: int) -> list[list[int]]:
    """Return the first steps that add up to `count` tokens."""
    kept = list[list[int]]()
    while sum(map(len, kept)) < count:
        kept.append(steps[len(kept)])
    return kept


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_does_what_was_published_step_by_step(
    greedy: Greedy, pair: Pair, tiny_target: str, sizes: tuple[int, int, int]
) -> None:
    """Law: every step adds the tokens of the published algorithm, provided that right window
    branches are accepted as well; without those, tokens per step agree within 5 %."""
    window, ngram, guesses = sizes
    engine = Engine(lookahead(tiny_target, window=window, ngram=ngram, guesses=guesses), pair=pair)
    counts = {False: 0, True: 0}
    for prompt in PROMPTS:
        ours = steps_of(engine, prompt, LENGTH)
        for ours_too in counts:
            slow = Lookahead(
                greedy, window=window, ngram=ngram, guesses=guesses, kept=ours_too, early=ours_too
            )
            theirs = [step.tokens for step in slow.generate(prompt, LENGTH)]
            counts[ours_too] += len(theirs)
            assert not ours_too or ours == theirs, prompt
    assert counts[True] <= counts[False] <= 1.05 * counts[True], counts
