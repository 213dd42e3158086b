"""Request body of /v1/completions: prompts, and the fields that only completions have."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.errors import invalid
from server.api.schema import CommonRequest, Length
from server.api.schema_values import Prompt, as_prompts


class CompletionRequest(CommonRequest):
    endpoint = "completions"

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(as_prompts)]
    max_tokens: Length | None = 16
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _nothing_thrown_away(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise invalid(
                "best_of", f"`best_of` must be 1 or equal to `n` ({self.n}): {self.best_of} given"
            )
        return self
