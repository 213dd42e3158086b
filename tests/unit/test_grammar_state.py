"""The matcher of one sequence, asked without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from llguidance import LLTokenizer

from engine.config import model_folder
from engine.constraint import has_bit
from engine.messages import Grammar, SamplingParams
from engine.sampling.grammar import TOO_SLOW, Compiled, GrammarState
from engine.sampling.grammar_source import compile_grammar
from engine.sampling.vocabulary import load_vocabulary
from engine.sequence import Sequence


@pytest.mark.parametrize("width", [4096, 4097, 4127, 4128, 4129])
def test_masks_of_vocabularies_of_any_width(width: int) -> None:
    """llguidance adds a word to the mask of a multiple of 32: the built-in pair's 4096 ids ended
    the engine."""
    vocabulary = load_vocabulary(model_folder("demo", "target"), vocab_size=width)
    grammar = Grammar("choice", '["yes", "no"]')
    seq = Sequence("s", SamplingParams(seed=0, max_tokens=9, grammar=grammar), [1], 1)
    compiled = Compiled(compile_grammar(grammar, vocabulary), vocabulary)
    allowed = compiled.state(seq, can_end=True).allowed(())
    assert allowed is not None
    found = [token for token in range(width) if has_bit(allowed, token)]
    words = {vocabulary.decode_str([token]) for token in found}
    assert {"y", "n"} <= words
    assert all("yes".startswith(word) or "no".startswith(word) for word in words)


def state_of(
    grammar: Grammar, seconds: Iterator[float] | None = None
) -> tuple[GrammarState, Sequence, LLTokenizer]:
    """A state whose clock reads `seconds`."""
    vocabulary = load_vocabulary(model_folder("demo", "target"))
    seq = Sequence("s", SamplingParams(seed=0, max_tokens=99, grammar=grammar), [1], 1)
    made = Compiled(compile_grammar(grammar, vocabulary), vocabulary).state(seq, can_end=True)
    if seconds is not None:
        made._clock = lambda: next(seconds)
    return made, seq, vocabulary


def test_masks_depend_on_the_tokens_alone() -> None:
    """Law: whatever was asked before, wherever the matcher stands, the mask after some tokens is
    the mask of a matcher that saw nothing else; committing changes nothing either."""
    grammar = Grammar(
        "json_schema", '{"type": "object", "additionalProperties": {"enum": [1, "a"]}}'
    )
    walked, seq, vocabulary = state_of(grammar)
    paths = [
        vocabulary.tokenize_str(text)
        for text in ("{", '{"x": 1', '{"xy": "a", "q', '{"x": "a"', '{"xy": 1}', "")
    ]
    rng = random.Random(7)
    for _ in range(200):
        path = rng.choice(paths)
        path = path[: rng.randint(0, len(path))]
        fresh, other, _ = state_of(grammar)
        other.tokens += path
        asked, told = walked.allowed(path), fresh.allowed([])
        assert asked is not None
        assert told is not None
        assert asked.tolist() == told.tolist()
        assert walked.forced(8, path) == fresh.forced(8)
        assert walked.is_complete(path) == fresh.is_complete([])
    committed = paths[2][:3]
    seq.tokens += committed
    for length in range(3, len(paths[2])):
        fresh, other, _ = state_of(grammar)
        other.tokens += paths[2][:length]
        asked, told = walked.allowed(paths[2][3:length]), fresh.allowed([])
        assert asked is not None
        assert told is not None
        assert asked.tolist() == told.tolist()
    assert walked.allowed(vocabulary.tokenize_str("]")) is None


def test_a_slow_grammar_ends_its_sequence() -> None:
    """Law: what takes more than its share of the step is an error of its own sequence."""
    slow, _, _ = state_of(Grammar("regex", "[ab]+"), itertools.count(step=0.4))
    assert slow.allowed([]) is not None
    assert slow.error is None
    slow.allowed([72])
    assert slow.error == TOO_SLOW
