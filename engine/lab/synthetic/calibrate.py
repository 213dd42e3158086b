"""How often draft and target agree, and the scale at which they do so as often as asked.

Agreement is acceptance under sample-and-match: at temperature 0 both argmaxes are equal, at 1 both
are once the same Gumbel noise is added (the draw is the argmax of log q + noise). It is measured on
text that the draft writes at temperature 1, whole models, in float32; where the text is from does
not matter, since either model's next token is a pseudo-random function of what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.demo.tokenizer import SPECIAL

PROMPT = 16  # random tokens before a text; not counted
DRAWS = 4  # of the noise, for each token
STEPS = 7  # of the bisection
LOUDEST, QUIETEST = 0.0, -9.0  # log2 of the scale


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of tokens, 0 to 1, at temperature 0 and 1."""

    greedy: float
    sampled: float

    @property
    def mean(self) -> float:
        return (self.greedy + self.sampled) / 2


class Text:
    """What the draft wrote, with its logits there."""

    def __init__(self, draft: Any, *, sequences: int, length: int, seed: int) -> None:
        self._device = draft.device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._known = (len(SPECIAL), draft.config.vocab_size)
        self.ids = self._write(draft, sequences, length)
        drawn = torch.randint(1 << 40, (), generator=self._generator, device=self._device)
        self._noise_seed = int(drawn)
        self._logits = self.logits(draft)

    @torch.inference_mode()
    def _write(self, draft: Any, sequences: int, length: int) -> Tensor:
        """`[sequences, PROMPT + length]`, sampled; `generate` would draw from the global state."""
        shape = (sequences, PROMPT)
        ids = torch.randint(*self._known, shape, generator=self._generator, device=self._device)
        output = draft(ids, use_cache=True)
        for _ in range(length - 1):
            chances = output.logits[:, -1].softmax(-1)
            token = torch.multinomial(chances, 1, generator=self._generator)
            ids = torch.cat([ids, token], dim=1)
            output = draft(token, past_key_values=output.past_key_values, use_cache=True)
        token = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=self._generator)
        return torch.cat([ids, token], dim=1)

    @torch.inference_mode()
    def logits(self, model: Any) -> Tensor:
        """`[tokens, vocabulary]` of every token after the prompts. One text at a time: the rows of
        all would be large."""
        rows = [model(one[None], use_cache=False).logits[0, PROMPT:] for one in self.ids]
        return torch.cat(rows)

    @torch.inference_mode()
    def agreement(self, target: Any) -> Agreement:
        """Of the target with the draft that wrote this."""
        ours, theirs = self.logits(target), self._logits
        generator = torch.Generator(self._device).manual_seed(self._noise_seed)
        equal = 0.0
        for _ in range(DRAWS):
            uniform = torch.rand(
                ours.shape, generator=generator, device=self._device, dtype=torch.float32
            ).clamp_(min=1e-9)
            noise = uniform.log_().neg_().log_().neg_()
            equal += _share((ours + noise).argmax(-1) == (theirs + noise).argmax(-1))
        return Agreement(_share(ours.argmax(-1) == theirs.argmax(-1)), equal / DRAWS)


def _share(equal: Tensor) -> float:
    return float(equal.float().mean())


def find_scale(
    wanted: float,
    measure: Callable[[float], Agreement],
    report: Callable[[float, Agreement], None],
) -> float:
    """By bisection in the logarithm. `measure` falls as the scale grows; the best scale seen is
    answered, so noise in the last steps does no harm."""
    low, high = QUIETEST, LOUDEST
    best, nearest = float(2.0**low), float("inf")
    for _ in range(STEPS):
        middle = (low + high) / 2
        scale = float(2.0**middle)
        found = measure(scale)
        report(scale, found)
        if abs(found.mean - wanted) < nearest:
            best, nearest = scale, abs(found.mean - wanted)
        low, high = (middle, high) if found.mean > wanted else (low, middle)
    return best
