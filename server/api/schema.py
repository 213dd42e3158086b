"""Request bodies: what the generation endpoints have in common, and how bytes become a request.

Strict types (a bool is no number, "3" is not 3), no NaN, unknown fields refused, every list and
number bounded before it is walked. `parse` turns bytes into a request or raises ApiError naming the
field; a null is the same as leaving the field out. NaN and Infinity are read, so that the field can
be named. Facts of the engine (vocabulary, context) are checked in `params`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    InstanceOf,
    ValidationError,
    create_model,
    model_validator,
)  # fmt: skip
from pydantic_core import CoreSchema

from engine.messages import MAX_LOGPROBS, PROPOSERS, Grammar
from server.api.body import Part, Text, parse_json
from server.api.constraints import (
    Constraint,
    FreeFormat,
    SchemaFormat,
    Source,
    StructuredBody,
    as_response_format,
    as_structured_outputs,
)  # fmt: skip
from server.api.errors import invalid, only
from server.api.explain import check_names, explain, must_be, wrong
from server.api.fields import ROWS, Endpoint
from server.api.limits import (
    MAX_LABEL_LENGTH,
    MAX_LENGTH_FIELD,
    MAX_LOGIT_BIAS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_N,
    MAX_PRIORITY,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPLATE_KWARGS,
)
from server.api.messages import Label, TextPart, text_of

TemplateValue = bool | int | float | str
TokenId = Annotated[int, Field(ge=0, title="TokenId")]  # /openapi.json adds the vocabulary's bound
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BiasKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
MetadataKey = Annotated[Text, Field(max_length=MAX_METADATA_KEY)]


class PredictionBody(Part):
    type: Literal["content"]
    content: Source | Annotated[list[TextPart], Field(min_length=1)]


class NoGuesses(Part):
    enabled: Literal[False]
    max_draft: None = None
    proposers: None = None


class NoDraft(Part):
    max_draft: Literal[0]
    enabled: Literal[True] | None = None
    proposers: None = None


class Guesses(Part):
    enabled: Literal[True] | None = None
    max_draft: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    proposers: (
        Annotated[
            list[Literal["draft_model", "ngram", "grammar", "prediction"]],
            Field(min_length=1, max_length=len(PROPOSERS), json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = None


def as_stops(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if (
        not isinstance(given, list)
        or len(given) > MAX_STOPS
        or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in given)
    ):
        raise must_be("stop", value)
    return tuple(given)


def as_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise must_be("logit_bias", value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"`logit_bias`: {key[:20]!r} is not a token id")
        if int(key) in bias:  # by another spelling, such as 07
            raise invalid("logit_bias", f"`logit_bias` names the token id {int(key)} twice")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise invalid(
                f"logit_bias.{key}",
                f"`logit_bias.{key}` must be a number from -100 to 100",
            )
        bias[int(key)] = float(number)
    return bias


def as_metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise must_be("metadata", value)
    for key, text in value.items():
        path = f"metadata.{key[:64]}"
        if len(key) > MAX_METADATA_KEY:
            raise invalid(path, f"`{path}`: a key has at most {MAX_METADATA_KEY} characters")
        if not isinstance(text, str) or len(text) > MAX_LABEL_LENGTH:
            raise wrong(path, f"a string of at most {MAX_LABEL_LENGTH} characters", text)
    return value


def as_template_kwargs(value: Any) -> dict[str, TemplateValue]:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise must_be("chat_template_kwargs", value)
    for name, given in value.items():
        path = f"chat_template_kwargs.{name[:64]}"
        fits = len(given) <= MAX_LABEL_LENGTH if isinstance(given, str) else True
        if not isinstance(given, bool | int | float | str) or given != given or not fits:
            raise wrong(
                path,
                f"true, false, a number or a string of at most {MAX_LABEL_LENGTH} characters",
                given,
            )
    return value


def as_stop_token_ids(value: Any) -> tuple[int, ...]:
    if not is_ids(value) or len(value) > MAX_STOP_TOKEN_IDS:
        raise must_be("stop_token_ids", value)
    return tuple(value)


def is_ids(value: Any) -> bool:
    # One pass in C: a body may hold millions, and other streams wait meanwhile.
    return isinstance(value, list) and set(map(type, value)) <= {int}


PART = '{"type": "text", "text": a string}'


@dataclass(frozen=True, slots=True)
class SpeculationWish:
    """`max_draft` None: auto. `proposers` None: the server's default."""

    enabled: bool = True
    max_draft: int | None = None
    proposers: tuple[str, ...] | None = None


def as_prediction(value: Any) -> str:
    """The text of {"type": "content", "content": ...}; parts follow each other directly."""
    if not isinstance(value, dict):
        raise must_be("prediction", value)
    only(value, ("type", "content"), "prediction")
    if value.get("type") != "content":
        raise invalid("prediction.type", '`prediction.type` must be "content"')
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, list) and content:
        content = "".join(_prediction_part(part, f"{path}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str) or not content:
        raise wrong(path, "a string or a list of text parts, and not empty", content)
    return content


def _prediction_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong(path, PART, part)
    if part.get("type") != "text":
        raise invalid(f"{path}.type", f'`{path}.type` must be "text"')
    return text_of(part, path)


def as_speculation(value: Any) -> SpeculationWish:
    if not isinstance(value, dict):
        raise must_be("speculation", value)
    given = {name: item for name, item in value.items() if item is not None}
    readers: dict[str, Callable[[Any], Any]] = {
        "enabled": _speculates,
        "max_draft": _max_draft,
        "proposers": _names,
    }
    only(given, readers, "speculation")
    wish = SpeculationWish(**{name: readers[name](item) for name, item in given.items()})
    beside = [f"speculation.{name}" for name in given if name != "enabled"]
    if beside and not wish.enabled:
        message = f"`{beside[0]}` is only allowed without `speculation.enabled`: false"
        raise invalid(beside[0], message)
    if wish.max_draft == 0 and wish.proposers is not None:
        path = "speculation.proposers"
        message = f"`{path}` is only allowed without `speculation.max_draft`: 0, which asks nobody"
        raise invalid(path, message)
    return wish


def _speculates(value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong("speculation.enabled", "true or false", value)
    return value


def _max_draft(value: Any) -> int | None:
    if value == "auto":
        return None
    if type(value) is not int or value < 0:
        raise wrong("speculation.max_draft", '"auto" or an integer of at least 0', value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    path = "speculation.proposers"
    if not isinstance(value, list) or not 1 <= len(value) <= len(PROPOSERS):
        raise wrong(path, f"a list of 1 to {len(PROPOSERS)} names", value)
    for i, name in enumerate(value):
        where = f"{path}[{i}]"
        if name not in PROPOSERS:
            known = ", ".join(f'"{known}"' for known in PROPOSERS)
            raise wrong(where, f"one of {known}", value=name)
        if name in value[:i]:
            raise invalid(where, f"`{where}`: {name} is named already")
    return tuple(value)


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Penalty = Annotated[float, Field(ge=-2, le=2)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH_FIELD)]


class RequestBody(Part):
    """The body of an endpoint. Names and meaning of its fields: `server.api.fields`."""

    endpoint: ClassVar[Endpoint]
    base: ClassVar[type[RequestBody] | None] = None  # whose fields it has too, read by that class

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Raises ApiError, always a 400."""
        given = {name: value for name, value in data.items() if value is not None}
        try:
            return cls.model_validate(check_names(given, cls.endpoint))
        except ValidationError as error:
            raise explain(error, cls.endpoint) from None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """As the table of fields has it: what is refused is left out, a null may stand for what may
        be left out."""
        fields = {**(cls.base.model_fields if cls.base else {}), **cls.model_fields}
        described: dict[str, Any] = {}
        for name, row in ROWS[cls.endpoint].items():
            if row.kind == "refused":
                continue
            field, about = fields[name], f"{row.meaning} Must be {row.allowed}."
            kind: Any = Annotated[(field.annotation, *field.metadata, None)]
            if cls.model_fields.get(name, field).is_required():
                described[name] = (kind, Field(description=about))
            else:
                described[name] = (kind | None, Field(None, description=about))
        model = create_model(cls.__name__, __base__=Part, **described)
        return handler(model.__pydantic_core_schema__)


class CommonRequest(RequestBody, ABC):
    """Fields of chat and completions."""

    model: str
    max_tokens: Length | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(
            as_stops,
            json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)],
        ),
    ] = ()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[int, float],
        BeforeValidator(
            as_logit_bias,
            json_schema_input_type=Annotated[dict[BiasKey, Bias], Field(max_length=MAX_LOGIT_BIAS)],
        ),
    ] = {}

    top_k: int = Field(0, ge=-1, le=MAX_LENGTH_FIELD)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0, le=MAX_LENGTH_FIELD)
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        tuple[int, ...],
        BeforeValidator(
            as_stop_token_ids,
            json_schema_input_type=Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)],
        ),
    ] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label = ""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    prediction: (
        Annotated[str, BeforeValidator(as_prediction, json_schema_input_type=PredictionBody)] | None
    ) = None
    speculation: (
        Annotated[
            SpeculationWish,
            BeforeValidator(as_speculation, json_schema_input_type=NoGuesses | NoDraft | Guesses),
        ]
        | None
    ) = None
    provenance: bool = False
    response_format: Annotated[
        InstanceOf[Constraint] | None,
        BeforeValidator(as_response_format, json_schema_input_type=FreeFormat | SchemaFormat),
    ] = None
    structured_outputs: Annotated[
        InstanceOf[Constraint] | None,
        BeforeValidator(as_structured_outputs, json_schema_input_type=StructuredBody),
    ] = None

    user: Label | None = None
    metadata: Annotated[
        dict[str, str] | None,
        BeforeValidator(
            as_metadata,
            json_schema_input_type=Annotated[
                dict[MetadataKey, Label], Field(max_length=MAX_METADATA)
            ],
        ),
    ] = None
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


def split(data: dict[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of an endpoint's own, and those that it shares with chat. Raises ApiError."""
    given = {name: value for name, value in data.items() if value is not None}
    kept, rows = check_names(given, endpoint), ROWS[endpoint]
    shared = {name: kept[name] for name in kept if ROWS["chat"].get(name) is rows[name]}
    return {name: kept[name] for name in kept if name not in shared}, shared


Request = TypeVar("Request", bound=RequestBody)


def parse(body: bytes, kind: type[Request]) -> Request:
    """A request from the bytes of its body. Raises ApiError, always a 400."""
    return kind.read(parse_json(body))
