"""Constraint: what a sequence's text must satisfy, as the step needs it. Implemented by a grammar's
matcher (sampling.grammar); here so that those who only ask need neither torch nor the library.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]  # one bit per token id, the lowest bit of a byte first


class Constraint(Protocol):
    """State of one sequence. Every question is about the text that ends with `path`, proposed
    tokens behind those of `extend`; the answer is a function of the tokens alone, but that behind a
    guess nothing at all may be allowed. Once `error` is set the sequence cannot go on, and answers
    mean nothing."""

    error: str | None

    @property
    def is_slow(self) -> bool:
        """Whether guesses about it cost more time than they may: there should be no more of them
        for now."""
        ...

    def extend(self, token: int) -> None:
        """The text goes on with `token`; from now on it belongs to it."""
        ...

    def allowed(self, path: Seq[int]) -> Bits | None:
        """What may follow; None if `path` itself is not allowed. EOS is in it where the text may
        end, unless the request ignores EOS."""
        ...

    def is_complete(self, path: Seq[int]) -> bool:
        """Whether nothing may follow but the end."""
        ...

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        """Tokens, `limit` at most, without which the text cannot go on after `path`."""
        ...


def has_bit(bits: Bits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
