"""The matcher of one sequence, asked without a model."""

from __future__ import annotations

import pytest

from engine.config import model_folder
from engine.constraint import has_bit
from engine.messages import Grammar, SamplingParams
from engine.sampling.grammar import Compiled
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
