"""Request bodies of /v1/chat/completions and /v1/completions, and what they have in common.

A list that could be long fails at its first bad entry (`fail_fast`), so that no body is slow to
refuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.config import PROPOSERS
from engine.messages import MAX_LOGPROBS, Grammar
from server.api import limits
from server.api.constraints import Constraint, ResponseFormat, StructuredOutputs
from server.api.errors import invalid
from server.api.messages import (
    Message,
    TextPart,
    ToolChoiceBody,
    Tools,
    as_template_sees,
    check_tools,
)
from server.api.request import Label, Part, RequestBody, Source, Text, fault, must_be


def at_most(count: int) -> BeforeValidator:
    """Of the members of an object, which are counted before they are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError
        return value

    return BeforeValidator(check)


def _by_token_id(bias: dict[str, float]) -> dict[str, float]:
    seen: set[int] = set()
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise fault("", f"`{{path}}`: {key[:20]!r} is not a token id")
        if int(key) in seen:  # written otherwise, such as 07
            raise fault("", f"`{{path}}` names the token id {int(key)} twice")
        seen.add(int(key))
    return bias


TokenId = Annotated[int, Field(ge=0, title="TokenId")]  # /openapi.json adds the vocabulary's bound
Stops = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]],
    Field(max_length=limits.MAX_STOPS, fail_fast=True),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
MetadataKey = Annotated[Text, Field(max_length=limits.MAX_METADATA_KEY)]
TemplateValue = bool | int | float | Label
Penalty = Annotated[float, Field(ge=-2, le=2)]
Length = Annotated[int, Field(ge=1, le=limits.MAX_LENGTH_FIELD)]


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(Part):
    type: Literal["content"]
    content: Source | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    @property
    def text(self) -> str:
        """Parts follow each other directly."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class SpeculationOptions(Part):
    """`proposers` None: the server's default."""

    enabled: bool = True
    max_draft: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    proposers: (
        Annotated[
            list[Literal["draft_model", "ngram", "grammar", "prediction"]],
            Field(min_length=1, max_length=len(PROPOSERS), json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        beside = [name for name in ("max_draft", "proposers") if name in self.model_fields_set]
        if beside and not self.enabled:
            raise fault(beside[0], "`{path}` is not allowed with `speculation.enabled`: false")
        if self.max_draft == 0 and self.proposers is not None:
            raise fault("proposers", "`{path}` is not allowed with `speculation.max_draft`: 0")
        for i, name in enumerate(self.proposers or ()):
            if name in (self.proposers or ())[:i]:
                raise fault(f"proposers[{i}]", f"`{{path}}`: {name} is named already")
        return self


class CommonRequest(RequestBody, ABC):
    """Fields of chat and completions."""

    model: str
    max_tokens: Length | None = None
    n: int = Field(1, ge=1, le=limits.MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[
        Stops,
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=Annotated[
                Text, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)
            ] | Stops,
        ),
    ] = []  # fmt: skip
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Bias],
        Field(max_length=limits.MAX_LOGIT_BIAS),
        at_most(limits.MAX_LOGIT_BIAS),
        AfterValidator(_by_token_id),
    ] = {}

    top_k: int = Field(0, ge=-1, le=limits.MAX_LENGTH_FIELD)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0, le=limits.MAX_LENGTH_FIELD)
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS, fail_fast=True)
    ] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label = ""
    priority: int = Field(0, ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None
    provenance: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    user: Label | None = None
    metadata: Annotated[
        dict[MetadataKey, Label],
        Field(max_length=limits.MAX_METADATA),
        at_most(limits.MAX_METADATA),
    ] = {}
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, by token id."""
        return {int(key): bias for key, bias in self.logit_bias.items()}

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
    def num_sequences(self) -> int:
        """Sequences generated in all."""
        return self.fan_out

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the text must satisfy, and the field that asks for it."""
        found = self.response_format.constraint if self.response_format is not None else None
        if found is None and self.structured_outputs is not None:
            return self.structured_outputs.constraint
        return found

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
        shaped = self.response_format is not None and self.response_format.constraint is not None
        if shaped and self.structured_outputs is not None:
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


class ChatRequest(CommonRequest):
    endpoint = "chat"

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[
        dict[str, TemplateValue],
        Field(max_length=limits.MAX_TEMPLATE_KWARGS),
        at_most(limits.MAX_TEMPLATE_KWARGS),
    ] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    tools: Tools = []
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None

    @property
    def length(self) -> int | None:
        given = self.max_completion_tokens
        return given if given is not None else self.max_tokens

    @property
    def generation_prompt(self) -> bool:
        """Whether the template begins the assistant's turn; a message that goes on has begun."""
        given = self.add_generation_prompt
        return given if given is not None else not self.continue_final_message

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def turns(self) -> list[dict[str, Any]]:
        """The messages as the chat template sees them."""
        return as_template_sees(self.messages)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "`top_logprobs` is only allowed with `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise invalid(
                "max_tokens",
                "`max_tokens` and `max_completion_tokens` name one limit; leave one of them out",
            )
        assert self.turns, "the messages fit together"
        if self.continue_final_message:
            self._check_final()
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    def _check_final(self) -> None:
        if self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` must not both be true",
            )
        last = self.messages[-1]
        path = f"messages[{len(self.messages) - 1}]"
        if last.role != "assistant" or last.tool_calls or not last.text.strip():
            raise invalid(
                path,
                f"`{path}` must be a message of the assistant with some text and no tool calls:"
                " `continue_final_message` continues it",
            )


Prompt = str | list[int]
OnePrompt = Source | Annotated[list[TokenId], Field(min_length=1)]
ManyPrompts = Annotated[list[OnePrompt], Field(min_length=1, max_length=limits.MAX_PROMPTS)]


def is_ids(value: Any) -> bool:
    # One pass in C: a body may hold very many, and other streams wait meanwhile.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or many, always as a tuple of them."""
    many = value if isinstance(value, list) and not (value and is_ids(value)) else [value]
    if not 1 <= len(many) <= limits.MAX_PROMPTS:
        raise must_be("prompt", value)
    for i, prompt in enumerate(many):
        path = "prompt" if many is not value else f"prompt[{i}]"
        if not (isinstance(prompt, str) or is_ids(prompt)):
            raise must_be("prompt", value)
        if not prompt:
            raise invalid(path, f"`{path}` is empty; a prompt needs at least one token")
    return tuple(many)


class CompletionRequest(CommonRequest):
    endpoint = "completions"

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(as_prompts, json_schema_input_type=OnePrompt | ManyPrompts),
    ]
    max_tokens: int | None = Field(16, ge=0, le=limits.MAX_LENGTH_FIELD)
    best_of: int | None = Field(None, ge=1, le=limits.MAX_N)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str = ""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def fan_out(self) -> int:
        return self.best_of or self.n

    @property
    def num_sequences(self) -> int:
        return len(self.prompt) * self.fan_out

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
