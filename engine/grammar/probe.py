"""A walk through a freshly compiled grammar, to meet its worst before an engine does.

A grammar may compile in a moment and explode when it is used: so the process that checks grammars
takes some steps along pseudo-random sentences, always the same ones. What turns out too complex,
allows nothing, or forces more text at once than is reasonable is refused. No torch.
"""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.source import GrammarRefused, require_sound

WALKS = 2
STEPS = 24
MAX_FORCED_BYTES = 4096


def probe(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    """Raises GrammarRefused. Leaves `matcher` where it ends up."""
    rng = random.Random(0)
    ends = set(vocabulary.eos_tokens)
    for _ in range(WALKS):
        walker = matcher.deep_copy()
        for step in range(STEPS):
            allowed = _allowed(walker)
            require_sound(walker)
            if not len(allowed):
                raise GrammarRefused(
                    f"after {step} tokens nothing is allowed any more: no text satisfies it"
                )
            if len(walker.compute_ff_bytes()) > MAX_FORCED_BYTES:
                raise GrammarRefused(f"it forces more than {MAX_FORCED_BYTES} bytes at once")
            going_on = [token for token in allowed.tolist() if token not in ends]
            if len(going_on) < len(allowed) and not walker.is_accepting():
                raise GrammarRefused("it has an end-of-text token in it, where no text may end")
            if not going_on:
                break
            walker.consume_token(rng.choice(going_on))
            require_sound(walker)


def _allowed(matcher: LLMatcher) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))
