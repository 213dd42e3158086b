"""Fill in the middle: how a model that was trained for it is asked for what stands between texts.

All models known here take prefix, suffix, then the middle (PSM: Bavarian et al., arXiv:2207.14255,
section 3); they differ in how the three tokens are spelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, the built-in
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)  # the last one: DeepSeek-Coder

# Besides the three and the model's own end of text, what such models write after the middle.
ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>",
    "<fim_pad>", "<file_sep>", "<repo_name>",
    "<fim-pad>",
    "\u2581<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillIn:
    """The ids of one spelling. `ends`: tokens after which the middle is over."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in(id_of: Callable[[str], int | None]) -> FillIn | None:
    """The spelling of which this vocabulary has all three tokens."""
    for spelling in SPELLINGS:
        prefix, suffix, middle = map(id_of, spelling)
        if prefix is not None and suffix is not None and middle is not None:
            ends = [token for token in map(id_of, ENDS) if token is not None]
            return FillIn(prefix, suffix, middle, (prefix, suffix, middle, *ends))
    return None
