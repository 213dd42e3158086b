"""Greedy lookahead decoding as published: slow, with explicit masks, no cache, no tree.

After Fu et al., 2024 (arXiv:2402.02057) and its authors' program (hao-ai-lab/LookaheadDecoding,
`jacobi_greedy_search_multilevel`): levels of tokens, a mask of lookahead rows and verification rows
side by side, n-grams by their first token. Shares no code with the engine. The window starts as the
last tokens of the prompt, where their program takes random tokens of it; the pool starts with the
prompt's n-grams (their POOL_FROM_PROMPT), and each new token adds one.

Two switches add what this engine does and the paper does not: `kept`: a window column that turns
out right is kept like an n-gram; `early`: n-grams are verified while the window is being filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Step:
    """The tokens that a step added, and the number of rows of its forward beyond the text's."""

    tokens: list[int]
    rows: int


class Greedy:
    """A model; returns the most likely next token of each row."""

    def __init__(self, path: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.eval()

    def __call__(
        self, tokens: list[int], positions: list[int], sees: list[list[bool]]
    ) -> list[int]:
        """`sees[i][j]`: whether row i attends to row j."""
        mask = torch.zeros(1, 1, len(tokens), len(tokens))
        mask[0, 0] = mask[0, 0].masked_fill(~torch.tensor(sees), torch.finfo(torch.float32).min)
        with torch.inference_mode():
            out = self._model(
                torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=mask,
                use_cache=False,
            ).logits[0]
        found: list[int] = out.argmax(-1).tolist()
        return found


@dataclass
class Forward:
    """The rows of a forward, each with the rows that it attends to. The text comes first."""

    text: list[int]
    rows: list[tuple[int, int, list[int]]] = field(default_factory=list)  # token, position, seen

    def add(self, token: int, position: int, seen: list[int]) -> int:
        """Add a row that sees the whole text and the rows `seen` after it; return its number."""
        self.rows.append((token, position, seen))
        return len(self.rows) - 1

    def run(self, model: Greedy) -> tuple[int, list[int]]:
        """Return the next token after the text, and after each of the rows."""
        size, more = len(self.text), len(self.rows)
        sees = [[j <= i for j in range(size)] + [False] * more for i in range(size)]
        for i, (_, _, seen) in enumerate(self.rows):
            sees.append([True] * size + [j in seen or j == i for j in range(more)])
        tokens = self.text + [token for token, _, _ in self.rows]
        positions = [*range(size), *(position for _, position, _ in self.rows)]
        next_tokens = model(tokens, positions, sees)
        return next_tokens[size - 1], next_tokens[size:]


class Lookahead:
    """`window`, `ngram` and `guesses` are W, N and G."""

    def __init__(
        self, model: Greedy, *, window: int, ngram: int, guesses: int, kept: bool, early: bool
    ) -> None:
        self.model, self.w, self.n, self.g = model, window, ngram, guesses
        self.kept, self.early = kept, early

    def generate(self, prompt: Sequence[int], count: int) -> list[Step]:
        """Return the steps until there are at least `count` tokens."""
        text, steps, self.pool = list(prompt), list[Step](), dict[int, list[tuple[int, ...]]]()
        for i in range(len(text) - self.n + 1):
            self.note(text[i], tuple(text[i + 1 : i + self.n]))
        size = self.w + self.n - 3
        self.levels = [(text[-size:] if len(text) > size else text * size)[:size]]
        while len(text) < len(prompt) + count:
            step = self.step(text)
            for token in step.tokens:
                text.append(token)
                if len(text) >= self.n:
                    self.note(text[-self.n], tuple(text[len(text) - self.n + 1 :]))
            steps.append(step)
        return steps

    def note(self, first: int, rest: tuple[int, ...]) -> None:
        own = self.pool.setdefault(first, [])
        if rest in own:
            own.remove(rest)
        own.append(rest)
        del own[: max(len(own) - self.g, 0)]

    def step(self, text: list[int]) -> Step:
        forward, last, n = Forward(list(text)), len(text) - 1, self.n
        # Lookahead rows: level 0 is causal; column i of other levels sees i of them and its own.
        base = [
            forward.add(token, last + 1 + i, list(range(i)))
            for i, token in enumerate(self.levels[0])
        ]
        columns = [list[int]() for _ in range(len(base) + 1)]
        for depth, level in enumerate(self.levels[1:], 1):
            assert len(level) == len(columns)
            for i, token in enumerate(level):
                row = forward.add(token, last + i + depth, base[:i] + columns[i])
                columns[i].append(row)
        # Verification rows: each n-gram sees itself.
        full = len(self.levels) == n - 1
        grams = list(reversed(self.pool.get(text[-1], []))) if full or self.early else []
        branches = list[list[int]]()
        for gram in grams:
            rows = list[int]()
            for depth, token in enumerate(gram):
                rows.append(forward.add(token, last + 1 + depth, list(rows)))
            branches.append(rows)
        following, next_tokens = forward.run(self.model)
        if self.kept:
            branches += [base[:i] + column for i, column in enumerate(columns)]
        best = [following]
        for rows in branches:
            found = [following]
            for row in rows:
                if forward.rows[row][0] != found[-1]:
                    break
                found.append(next_tokens[row])
            if len(found) > len(best):
                best = found
        ends = [base[:i] + column for i, column in enumerate(columns)]
        self.move(text[-1], [next_tokens[end[-1]] if end else following for end in ends], full)
        return Step(best, len(forward.rows))

    def move(self, last: int, new: list[int], full: bool) -> None:
        if not full:
            self.levels = [level[1:] for level in self.levels] + [new[1:]]
            return
        for i, token in enumerate(new):
            first = last if i == 0 else self.levels[0][i - 1]
            self.note(first, (*(level[i] for level in self.levels[1:]), token))
        below = [*self.levels[1:], new]
        self.levels = [below[0][1:], *below[1:]]
