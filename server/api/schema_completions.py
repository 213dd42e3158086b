"""Request body of /v1/completions: prompts, and the fields that only completions have."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.errors import invalid
from server.api.limits import MAX_LENGTH_FIELD, MAX_N
from server.api.schema import CommonRequest
from server.api.schema_values import Prompt, as_prompts


class CompletionRequest(CommonRequest):
    endpoint = "completions"

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(as_prompts)]
    max_tokens: int | None = Field(16, ge=0, le=MAX_LENGTH_FIELD)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str = ""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def fan_out(self) -> int:
        return self.best_of or self.n

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fan_out < self.n:
            raise invalid(
                "best_of",
                f"`best_of` must be at least `n` ({self.n}), but {self.best_of} was given",
            )
        if self.fan_out > self.n and self.stream:
            raise invalid(
                "best_of",
                f"`best_of` must be left out or equal to `n` ({self.n}) with `stream`: true, since"
                " candidates are compared when they are complete",
            )
        if self.suffix and self.echo:
            raise invalid("echo", "`echo` is only allowed without `suffix`")
        return self
