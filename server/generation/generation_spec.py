"""GenerationSpec: the parameters of one API call, and the engine requests made from them.

Seeds: choice 0 of every prompt uses the request's seed itself, choice i the i-th output of
SplitMix64 started there (Steele, Lea, Flood 2014), so any single choice can be replayed with n=1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.messages import ResumedReply, SamplingParams, Submit
from server.engine.client import EngineClient
from server.engine.mailbox import Stream
from server.generation.annotations import token_text
from server.text.detokenizer import Detokenizer
from server.text.reasoning import Thinking
from server.text.tokenizer import Tokenizer

MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """The proposers that a request may use, and its bound on draft tokens per step."""

    enabled: bool = False
    max_draft: int | Literal["auto"] = 0
    proposers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the start of a completion: its text, the ids for its logprobs, the number of
    alternatives (None: no logprobs), and `positions`, if known."""

    text: str
    tokens: Sequence[int]
    alternatives: int | None = None
    places: Sequence[int] = ()

    def positions(self, tokenizer: Tokenizer) -> Iterator[int]:
        """Yield where each token's text starts, in characters."""
        pieces = Detokenizer(tokenizer, skip_special_tokens=True)
        position = 0
        for token in self.tokens:
            yield min(position, len(self.text))
            piece = pieces.push([token])
            if tokenizer.is_special(token):  # in the prompt's text, or added to it
                name = token_text(tokenizer.token_bytes(token))
                piece = name if self.text.startswith(name, position) else ""
            position += len(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What to generate. `params`: of choice 0; the others differ only in the seed (and compute
    prompt logprobs only for an echo). `context`: limit of prompt plus output; `max_tokens` is
    clipped to it. `n` choices are returned of the `best_of` (at least `n`) generated per prompt.
    `echoes`: per prompt, the start of the completion; None: no echo. `begun`: tokens of the only
    reply that the client already has; their text is not sent again. `show_logprobs`: send those of
    generated tokens to the client; `show_tokens`: send their ids."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    context: int
    n: int = 1
    best_of: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()  # special tokens whose text is kept
    continues: bool = True  # whether the text goes on where the prompt's ends
    thinking: Thinking | None = None  # its marks; stop strings do not apply, usage counts it
    echoes: Sequence[Echo] | None = None
    begun: Sequence[int] | None = None
    show_logprobs: bool = True
    show_tokens: bool = False
    drafting: Drafting = Drafting()  # what `params` allow in this engine
    grammar_param: str | None = None  # the request field with the grammar
    tenant: str = ""  # of the request; `weight`: its share if tenants compete
    weight: float = 1.0
    seconds: float | None = None  # time limit

    @property
    def fan_out(self) -> int:
        """Return the number of sequences per prompt."""
        return max(self.n, self.best_of)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def submit(self, client: EngineClient, *, arrival: float) -> Iterator[Stream]:
        """Submit the choices one by one, and yield their mailboxes. Raises NotReady."""
        for index in range(len(self.prompts) * self.fan_out):
            yield client.submit(self._of_choice(index, arrival=arrival))

    def _of_choice(self, index: int, *, arrival: float) -> Submit:
        """Return the engine request of choice `index`, counted over all prompts."""
        prompt_index, i = divmod(index, self.fan_out)
        prompt = list(self.prompts[prompt_index])
        max_tokens = min(self.params.max_tokens, self.context - len(prompt))
        params = msgspec.structs.replace(
            self.params,
            seed=choice_seed(self.params.seed, i),
            max_tokens=max_tokens,
            min_tokens=min(self.params.min_tokens, max_tokens),
            prompt_logprobs=self.params.prompt_logprobs if i == 0 or self.echoes else None,
        )
        id, begun = f"{self.id}-{index}", ResumedReply(list(self.begun or ()))
        return Submit(id, prompt, params, arrival, begun, tenant=self.tenant, weight=self.weight)


def choice_seed(seed: int, i: int) -> int:
    """Return the 64-bit seed of choice i: `seed` for i = 0, else SplitMix64's i-th output."""
    if i == 0:
        return seed & MASK
    z = (seed + i * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
