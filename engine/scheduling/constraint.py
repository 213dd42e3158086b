"""Constraint: what a step needs to know about a grammar. The grammar matchers implement it; it is
defined here so that its users import neither torch nor the grammar library."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]  # one bit per token id, the lowest bit of a byte first


class Constraint(Protocol):
    """The grammar state of one sequence. `path`: draft tokens after those given to `extend`; every
    method answers for the text that ends with it. Answers depend on the tokens only, except that
    after a draft token `allowed` may be empty. Once `error` is set the sequence must end, and
    answers have no meaning."""

    error: str | None

    @property
    def is_slow(self) -> bool:
        """Whether checking draft tokens takes longer than allowed: no speculation for now."""
        ...

    def extend(self, token: int) -> None:
        """Append `token` to the text."""
        ...

    def allowed(self, path: Seq[int]) -> Bits | None:
        """Return the tokens that may follow; None if `path` itself is not allowed. Includes EOS
        where the text may end, unless the request ignores EOS."""
        ...

    def is_complete(self, path: Seq[int]) -> bool:
        """Whether only EOS may follow."""
        ...

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        """Return the only possible continuation of `path`, at most `limit` tokens."""
        ...


def has_bit(bits: Bits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
