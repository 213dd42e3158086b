"""Request bodies: what /v1/completions and both endpoints' common fields may hold.

Strict types (a bool is no number, "3" is not 3), no NaN, unknown fields refused, every list and
number bounded. `parse` turns bytes into a request or raises ApiError naming the field; a null is
the same as leaving the field out. NaN and Infinity are read, so that the field can be named.
Facts of the engine (vocabulary, context) are checked in intake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from engine.messages import MAX_LOGPROBS
from server.api.errors import ApiError, invalid
from server.api.explain import check_names, explain, must_be
from server.api.fields import (
    MAX_LABEL_LENGTH,
    MAX_LENGTH_FIELD,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_PROMPTS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Endpoint,
)

Prompt = str | list[int]


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in stops)
    ):
        raise must_be("stop", value)
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise must_be("logit_bias", value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"`logit_bias`: {key[:20]!r} is not a token id")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise invalid(
                f"logit_bias.{key}",
                f"`logit_bias.{key}` must be a number from -100 to 100",
            )
        bias[int(key)] = float(number)
    return bias


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if not _is_ids(value) or len(value) > MAX_STOP_TOKEN_IDS:
        raise must_be("stop_token_ids", value)
    return tuple(value)


def _is_ids(value: Any) -> bool:
    # One pass in C: a body may hold millions, and other streams wait meanwhile.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or many, always as a tuple of them."""
    many = value if isinstance(value, list) and not (value and _is_ids(value)) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise must_be("prompt", value)
    for i, prompt in enumerate(many):
        path = "prompt" if many is not value else f"prompt[{i}]"
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise must_be("prompt", value)
        if not prompt:
            raise invalid(path, f"`{path}` is empty; a prompt needs at least one token")
    return tuple(many)


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Part):
    include_usage: bool = False


Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH_FIELD)]


class CommonRequest(Part, ABC):
    """Fields of both endpoints. Names and meaning: `server.api.fields`."""

    model: str
    max_tokens: Length | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = {}

    top_k: int = Field(0, ge=-1, le=MAX_LENGTH_FIELD)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0, le=MAX_LENGTH_FIELD)
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_stop_token_ids)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label = ""

    user: Label | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Annotated[str, Field(pattern="^(auto|default)$")] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def length(self) -> int | None:
        """Tokens to generate when the request says so."""
        return self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Alternatives per generated token; None: no logprobs."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true")
        if self.length is not None and self.min_tokens > self.length:
            raise invalid(
                "min_tokens",
                f"`min_tokens` must be at most `max_tokens` ({self.length}), but"
                f" {self.min_tokens} was given",
            )
        return self


class CompletionRequest(CommonRequest):
    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]
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


Request = TypeVar("Request", bound=CommonRequest)


def parse(body: bytes, kind: type[Request], endpoint: Endpoint) -> Request:
    """A request from the bytes of its body. Raises ApiError, always a 400."""
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in data.items() if value is not None}
    try:
        return kind.model_validate(check_names(given, endpoint))
    except ValidationError as error:
        raise explain(error) from None
