"""Request bodies: what the generation endpoints have in common, and how bytes become a request.

Strict types (a bool is no number, "3" is not 3), no NaN, unknown fields refused, every list and
number bounded. `parse` turns bytes into a request or raises ApiError naming the field; a null is
the same as leaving the field out. NaN and Infinity are read, so that the field can be named.
Facts of the engine (vocabulary, context) are checked in `params`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)

from engine.messages import MAX_LOGPROBS, Grammar
from server.api.body import parse_json
from server.api.constraints import Constraint, as_response_format, as_structured_outputs
from server.api.errors import invalid
from server.api.explain import check_names, explain
from server.api.field_row import Endpoint
from server.api.limits import MAX_LABEL_LENGTH, MAX_LENGTH_FIELD, MAX_N, MAX_PRIORITY
from server.api.schema_guesses import SpeculationWish, as_prediction, as_speculation
from server.api.schema_values import as_logit_bias, as_metadata, as_stop_token_ids, as_stops


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH_FIELD)]


class CommonRequest(Part, ABC):
    """Fields of both endpoints. Names and meaning: `server.api.fields`."""

    endpoint: ClassVar[Endpoint]

    model: str
    max_tokens: Length | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(as_stops)] = ()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(as_logit_bias)] = {}

    top_k: int = Field(0, ge=-1, le=MAX_LENGTH_FIELD)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0, le=MAX_LENGTH_FIELD)
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(as_stop_token_ids)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label = ""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    prediction: Annotated[str, BeforeValidator(as_prediction)] | None = None
    speculation: Annotated[SpeculationWish, BeforeValidator(as_speculation)] | None = None
    provenance: bool = False
    response_format: Annotated[
        InstanceOf[Constraint] | None, BeforeValidator(as_response_format)
    ] = None
    structured_outputs: Annotated[
        InstanceOf[Constraint] | None, BeforeValidator(as_structured_outputs)
    ] = None

    user: Label | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(as_metadata)] = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
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
    def fan_out(self) -> int:
        """Sequences generated per prompt."""
        return self.n

    @property
    def constraint(self) -> Constraint | None:
        """What the text must satisfy, and the field that says so."""
        return self.response_format or self.structured_outputs

    @property
    def grammar(self) -> Grammar | None:
        return self.constraint.grammar if self.constraint is not None else None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid(
                "prompt_logprobs", "`prompt_logprobs` is only allowed without `stream`: true"
            )
        if self.response_format is not None and self.structured_outputs is not None:
            raise invalid(
                "structured_outputs",
                "`structured_outputs` and `response_format` both shape the text; leave one out",
            )
        if self.length is not None and self.min_tokens > self.length:
            raise invalid(
                "min_tokens",
                f"`min_tokens` must be at most `max_tokens` ({self.length}), but"
                f" {self.min_tokens} was given",
            )
        return self


Request = TypeVar("Request", bound=BaseModel)


def parse(body: bytes, kind: type[Request], endpoint: Endpoint) -> Request:
    """A request from the bytes of its body. Raises ApiError, always a 400."""
    data = parse_json(body)
    given = {name: value for name, value in data.items() if value is not None}
    try:
        return kind.model_validate(check_names(given, endpoint))
    except ValidationError as error:
        raise explain(error, endpoint) from None
