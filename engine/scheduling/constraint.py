"""Constraint: what a step needs to know about a grammar. Implemented by the grammar matchers;
defined here so that its users import neither torch nor the grammar library."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]  # one bit per token id, the lowest bit of a byte first


class Constraint(Protocol):
    """The state of one sequence. `path`: draft tokens after those given to `extend`; every question
    is about the text that ends with it. Answers depend on the tokens only, except that after a
    draft token `allowed` may be empty. Once `error` is set the sequence must end, and answers have
    no meaning."""

    error: str | None

    @property
    def is_slow(self) -> bool:
        """Whether questions about draft tokens take longer than they may: no speculation for
        now."""
        ...

    def extend(self, token: int) -> None:
        """Append `token` to the text."""
        ...

    def allowed(self, path: Seq[int]) -> Bits | None:
        """Tokens that may follow; None if `path` itself is not allowed. Includes EOS where the text
        may end, unless the request ignores EOS."""
        ...

    def is_complete(self, path: Seq[int]) -> bool:
        """Whether only EOS may follow."""
        ...

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        """The only possible continuation of `path`, `limit` tokens at most."""
        ...


def has_bit(bits: Bits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
