"""The sampling parameters of most requests: temperature and filters. No tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf, log
from struct import Struct
from typing import NamedTuple

from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence

NOT_FINITE, UNDECIDED = -1, -2  # in place of a drawn token
NO_TOKEN = -1  # in place of a second-best token
MAX_MARGIN = 99.0  # the largest reported margin of a token over the next one

BELOW_ZERO = -1e-30  # between 0 and any difference of two float32 logits that is below it

# Summed per id: it is in the prompt; it ends a text; once per time that it was generated.
PROMPT, ENDS, GENERATED = 1, 2, 4

_LEAST_TEMPERATURE = 1e-6  # below it, the noise is lost in float32 next to the scaled logits
_PARTS, _WORDS = Struct("<Qfxxxxqdd"), Struct("<qixxxxqqq")


class Plain(NamedTuple):
    """Temperature and filters of a row. `scale` multiplies the logits, 0 means greedy; `floor`: log
    of min_p, minus infinity is off; `top_k`: 0 is off. `words`: seed, scale as float32, top_k,
    top_p and floor for compiled code, the bits of each in an int64."""

    scale: float
    top_k: int
    top_p: float
    floor: float
    words: tuple[int, int, int, int, int]

    def is_filtered(self, vocab_size: int) -> bool:
        """Whether a filter can remove a drawn token. At temperature 0 every filter keeps the most
        likely token."""
        cut = 0 < self.top_k < vocab_size or self.top_p < 1 or self.floor > -inf
        return self.scale > 0 and cut


class Rows(NamedTuple):
    """Consecutive rows of logits of one sequence: the first predicts `position`, each other one
    follows a draft token and predicts the position after its parent's (`parents` as in Proposal;
    None: a chain). Rows after a draft token that differs from the draw at its parent may stay
    undrawn. Without `draft_tokens`, all are drawn."""

    seq: Sequence
    first: int
    size: int
    position: int
    draft_tokens: Seq[int] = ()
    parents: Seq[int] | None = None


def plain_of(params: SamplingParams) -> Plain:
    """Return the Plain of a request's seed, temperature and filters."""
    scale = 1 / max(params.temperature, _LEAST_TEMPERATURE) if params.temperature else 0.0
    floor = log(params.min_p) if params.min_p else -inf
    top_k, top_p = params.top_k, params.top_p
    bits = _PARTS.pack(params.seed, scale, top_k, top_p, floor)
    return Plain(scale, top_k, top_p, floor, _WORDS.unpack(bits))
