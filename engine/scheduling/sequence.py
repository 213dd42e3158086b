"""Sequence: one choice of one request, as the engine sees it. Owned by the scheduler.

There is no prefill flag: a sequence has tokens, and a count of those whose KV is computed, which
catches up. Prompt, decode, verification and resumption after preemption follow the same rule.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from engine.messages import FinishReason, SamplingParams, TokenLogprobs
from engine.scheduling.constraint import Constraint

Status = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens`: the prompt, then the committed tokens. The last token is never computed before a
    step samples, since sampling needs that row's logits. All counts are in tokens."""

    id: str
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    number: int = 0  # unique, in order of arrival
    arrival: float = 0.0
    tenant: str = ""  # of the request; `weight`: its share when tenants compete
    weight: float = 1.0
    num_computed: int = 0  # positions whose target KV is valid
    num_draft_computed: int = 0  # the same for the drafter's plane
    blocks: array[int] = field(
        default_factory=lambda: array("i")
    )  # ids in order; numpy can read an array directly
    num_published: int = 0  # full blocks already offered to the prefix cache
    num_draft_ready: int = 0  # full blocks already marked as filled in the drafter's plane
    digests: list[bytes] = field(default_factory=list)  # hash chain of the full blocks so far
    status: Status = "waiting"
    finish: FinishReason | None = None
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
    queued: float | None = None  # seconds from arrival to its first step
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    predicted: int = 0  # proposed tokens that came from the request's prediction
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    constraint: Constraint | None = None  # the state of its grammar
    follows_grammar: bool = False  # whether the grammar may propose tokens
    lookup_from: int = 0  # length from which look-up proposers are asked again
    paid_at: int = 0  # length when a look-up last paid; pauses grow from there
    sources: tuple[str, ...] | None = None  # proposers in order; None: the main one, unbounded

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether rows of its prompt need logits: until its first token, if it asked for them."""
        return self.params.prompt_logprobs is not None and len(self.tokens) == self.num_prompt

    @property
    def max_draft(self) -> int | None:
        """Return the request's bound on draft tokens per step; None: no bound."""
        settings = self.params.speculation
        return None if settings is None else settings.max_draft
