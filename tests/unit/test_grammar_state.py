"""The matcher of one sequence, asked without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from llguidance import LLTokenizer

from engine.allowance import Allowance
from engine.config import model_folder
from engine.constraint import has_bit
from engine.controller import FixedK, Load
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
    slow, seq, _ = state_of(Grammar("regex", "[ab]+"), itertools.count(step=0.4))
    assert slow.allowed([]) is not None
    assert slow.error is None
    seq.tokens.append(72)
    slow.allowed([])
    assert slow.error == TOO_SLOW


class Clock:
    """Each reading is `step` after the one before."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __iter__(self) -> Clock:
        return self

    def __next__(self) -> float:
        self.now += self.step
        return self.now


def test_a_guess_that_breaks_the_matcher_is_forgotten() -> None:
    """Bug: a guess on which the grammar explodes ended its sequence, which without speculation
    would never have gone there. Nothing may follow such a guess, so nobody goes beyond it; where
    the text itself goes there, it ends as it does without guesses."""
    explodes = 'start: "x"+ | "z" e\ne: e e | "a" | "b" | /[a-z]/ | "(" e ")"'
    state, seq, vocabulary = state_of(Grammar("lark", explodes))
    [x], [z] = vocabulary.tokenize_str("x"), vocabulary.tokenize_str("z")
    assert state.allowed([]) is not None
    beyond = state.allowed([z])
    assert beyond is not None
    assert not beyond.any()
    assert not state.is_complete([z])
    assert state.is_slow
    assert state.error is None
    again = state.allowed([x])
    assert again is not None
    assert has_bit(again, x)
    assert not has_bit(again, z)
    seq.tokens.append(z)
    assert state.allowed([]) is None
    assert state.error is not None
    assert "Too many items" in state.error


def test_guesses_are_no_part_of_the_time_that_a_text_may_take() -> None:
    """Bug: a grammar of 4 ms a mask ended after 92 tokens under K = 8, and after 148 without
    speculation, since masks of rejected guesses counted too. Now they end the guessing."""
    clock = Clock(0.0)
    state, seq, vocabulary = state_of(Grammar("regex", "[abx]*"), clock)
    [x], path = vocabulary.tokenize_str("x"), vocabulary.tokenize_str("bab")
    for _ in range(30):
        clock.step = 0.1
        for size in range(len(path)):
            assert state.allowed(path[: size + 1]) is not None
        clock.step = 0.0
        seq.tokens.append(x)
        assert state.allowed([]) is not None
    assert state.is_slow
    assert state.error is None


@pytest.mark.parametrize("guessed", [False, True])
def test_guesses_that_were_kept_count_as_the_text_does(guessed: bool) -> None:
    """Law: what the text itself costs is the same with guesses and without, and has an end."""
    state, seq, vocabulary = state_of(Grammar("regex", "[abx]*"), Clock(0.1))
    [a] = vocabulary.tokenize_str("a")
    for _ in range(12):
        if guessed:
            state.allowed([a])
        seq.tokens.append(a)
        state.allowed([])
    assert state.error == TOO_SLOW
    assert not state.is_slow


def test_no_more_guesses_about_a_slow_grammar() -> None:
    """Law: a sequence whose grammar makes guesses dear keeps its text and loses its guesses."""
    state, seq, _ = state_of(Grammar("regex", "[abx]*"))
    seq.constraint = state
    allowance = Allowance(FixedK(4), "draft_model", {})
    allowance.begin(Load(num_sequences=1, context_tokens=1))
    assert allowance.want(seq) == 4
    state.is_slow = True
    assert allowance.want(seq) == 0
