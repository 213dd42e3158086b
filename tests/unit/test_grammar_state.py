"""The grammar matcher of one sequence, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.config import model_folder
from engine.control.controller import FixedK, Load
from engine.grammar.compiler import GrammarState, eos_bits
from engine.grammar.source import compile_grammar
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar, SamplingParams
from engine.scheduling.constraint import has_bit
from engine.scheduling.sequence import Sequence
from engine.speculation.allowance import Allowance

VOCABULARY = load_vocabulary(model_folder("demo", "target"))


@pytest.mark.parametrize("width", [4096, 4097, 4127, 4128, 4129])
def test_masks_of_vocabularies_of_any_width(width: int) -> None:
    """Bug: llguidance adds a word to the mask if the width is a multiple of 32, so the built-in
    pair's 4096 ids crashed the engine."""
    vocabulary = load_vocabulary(model_folder("demo", "target"), vocab_size=width)
    grammar = Grammar("choice", '["yes", "no"]')
    matcher = compile_grammar(grammar, vocabulary)
    allowed = GrammarState(matcher, eos=eos_bits(vocabulary), may_end=True).allowed(())
    assert allowed is not None
    found = [token for token in range(width) if has_bit(allowed, token)]
    words = {vocabulary.decode_str([token]) for token in found}
    assert {"y", "n"} <= words
    assert all("yes".startswith(word) or "no".startswith(word) for word in words)


def state_of(
    grammar: Grammar, seconds: Iterator[float] | None = None
) -> tuple[GrammarState, Sequence, LLTokenizer]:
    """Return a state whose clock reads `seconds`."""
    vocabulary = VOCABULARY
    seq = Sequence("s", SamplingParams(seed=0, max_tokens=99, grammar=grammar), [1], 1)
    matcher = compile_grammar(grammar, vocabulary)
    made = GrammarState(matcher, eos=eos_bits(vocabulary), may_end=True)
    if seconds is not None:
        made._clock = lambda: next(seconds)
    return made, seq, vocabulary


def extend(state: GrammarState, tokens: Iterable[int]) -> None:
    for token in tokens:
        state.extend(token)


def test_masks_depend_on_the_tokens_alone() -> None:
    """Law: the mask after some tokens is that of a fresh matcher, whatever was asked before and
    wherever the matcher stands; committing tokens changes nothing either. The clock stands still,
    since on a busy machine one matcher ran out of time for forced tokens."""
    grammar = Grammar(
        "json_schema", '{"type": "object", "additionalProperties": {"enum": [1, "a"]}}'
    )
    walked, _, vocabulary = state_of(grammar, repeat(0.0))
    paths = [
        vocabulary.tokenize_str(text)
        for text in ("{", '{"x": 1', '{"xy": "a", "q', '{"x": "a"', '{"xy": 1}', "")
    ]
    rng = random.Random(7)
    for _ in range(200):
        path = rng.choice(paths)
        path = path[: rng.randint(0, len(path))]
        fresh, _, _ = state_of(grammar, repeat(0.0))
        extend(fresh, path)
        mask, expected = walked.allowed(path), fresh.allowed([])
        assert mask is not None
        assert expected is not None
        assert mask.tolist() == expected.tolist()
        assert walked.forced(8, path) == fresh.forced(8)
        assert walked.is_complete(path) == fresh.is_complete([])
    committed = paths[2][:3]
    extend(walked, committed)
    for length in range(3, len(paths[2])):
        fresh, _, _ = state_of(grammar)
        extend(fresh, paths[2][:length])
        mask, expected = walked.allowed(paths[2][3:length]), fresh.allowed([])
        assert mask is not None
        assert expected is not None
        assert mask.tolist() == expected.tolist()
    assert walked.allowed(vocabulary.tokenize_str("]")) is None


class Clock:
    """Each reading is `step` seconds after the one before."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __iter__(self) -> Clock:
        return self

    def __next__(self) -> float:
        self.now += self.step
        return self.now


def test_a_draft_token_that_breaks_the_matcher_is_forgotten() -> None:
    """Bug: a draft token on which the grammar explodes ended its sequence, although without
    speculation the text would not have gone there. Such a token has an empty mask, so nothing
    follows it; if the text itself goes there, it ends as it does without speculation."""
    explodes = 'start: "x"+ | "z" e\ne: e e | "a" | "b" | /[a-z]/ | "(" e ")"'
    state, _, vocabulary = state_of(Grammar("lark", explodes))
    [x], [z] = vocabulary.tokenize_str("x"), vocabulary.tokenize_str("z")
    assert state.allowed([]) is not None
    beyond = state.allowed([z])
    assert beyond is not None
    assert not beyond.any()
    assert not state.is_complete([z])
    assert state.error is None
    again = state.allowed([x])
    assert again is not None
    assert has_bit(again, x)
    assert not has_bit(again, z)
    state.extend(z)
    assert state.allowed([]) is None
    assert state.error is not None
    assert "Too many items" in state.error


def test_a_slow_grammar_stops_speculation_for_a_while() -> None:
    """Law: a time limit stops speculation for a while, but never the text. Meanwhile masks exist
    for the text only: after a draft token they are empty."""
    clock = Clock(0.0)
    state, _, vocabulary = state_of(Grammar("regex", "[abx]*"), clock)
    [x], path = vocabulary.tokenize_str("x"), vocabulary.tokenize_str("bab")
    for _ in range(30):
        clock.step = 0.02
        answers = [state.allowed(path[: size + 1]) for size in range(len(path))]
        clock.step = 0.0
        state.extend(x)
        here = state.allowed([])
        assert here is not None
        assert has_bit(here, x)
    assert state.is_slow
    assert [bits is not None and not bits.any() for bits in answers] == [True] * len(path)
    assert state.forced(3) == []
    assert state.error is None
    for _ in range(600):
        state.extend(x)
    assert not state.is_slow
    beyond = state.allowed([x])
    assert beyond is not None
    assert beyond.any()


def test_one_slow_mask_stops_speculation() -> None:
    clock = Clock(1.0)
    state, _, vocabulary = state_of(Grammar("regex", "[abx]*"), clock)
    state.extend(vocabulary.tokenize_str("x")[0])
    assert state.allowed([]) is not None
    assert state.is_slow
    assert state.error is None


AMBIGUOUS = {
    "row": 'start: a\na: a a a | a a | "x" |',
    "mask": "start: s\ns: s s s | s s | /[a-z]+/ | /[a-z ]{1,5}/",
    "lexer": "start: A\nA: /([a-z ]*(e|t)[a-z ]{11}q)*/ & ~/.*the.{9}a.*/",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_where_a_text_ends_does_not_depend_on_speculation(name: str) -> None:
    """Law: a grammar that proves too complex ends its text after the same token with the same
    message, whatever was proposed before and whoever used the compiled grammar. Bug: it depended on
    CPU time and on what a matcher remembered of draft tokens."""
    grammar = Grammar("lark", AMBIGUOUS[name])
    plain, _, _ = state_of(grammar)
    drafting = GrammarState(plain._text, eos=plain._eos, may_end=True, clock=lambda: 0.0)
    rng, text = random.Random(3), list[int]()
    while plain.error is None and len(text) < 150:
        here = plain.allowed([])
        assert here is not None
        without_eos = np.flatnonzero(np.unpackbits(here & ~plain._eos, bitorder="little")).tolist()
        if not without_eos:
            break
        for _ in range(3):
            path: list[int] = []
            while len(path) < 4 and (bits := drafting.allowed(path)) is not None and bits.any():
                ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
                path.append(rng.choice(ids))
            drafting.forced(4, path)
        token = rng.choice(without_eos)
        text.append(token)
        plain.extend(token)
        drafting.extend(token)
        expected, mask = plain.allowed([]), drafting.allowed([])
        assert (expected is None) == (mask is None)
        assert expected is None or (mask is not None and expected.tolist() == mask.tolist())
    assert plain.error == drafting.error
    assert plain.error is not None


def test_a_slow_grammar_gets_no_draft_tokens() -> None:
    """Law: a sequence whose grammar is slow keeps its text but gets no draft tokens."""
    clock = Clock(0.0)
    state, seq, vocabulary = state_of(Grammar("regex", "[abx]*"), clock)
    seq.constraint = state
    allowance = Allowance(FixedK(4), "draft_model", {})
    allowance.begin(Load(num_sequences=1))
    assert allowance.draft_rows(seq) == 4
    clock.step = 1.0
    state.allowed(vocabulary.tokenize_str("a"))
    assert allowance.draft_rows(seq) == 0
