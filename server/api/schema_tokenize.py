"""Request bodies of /tokenize and /detokenize. Names and meaning: `server.api.fields_tokenize`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from server.api.errors import ApiError, invalid
from server.api.explain import must_be
from server.api.field_row import Endpoint
from server.api.schema import Part
from server.api.schema_messages import Message, as_messages
from server.api.schema_tools import Tool, as_tools
from server.api.schema_values import is_ids


class TokenizeRequest(Part):
    """Either `prompt` or `messages`."""

    endpoint: ClassVar[Endpoint] = "tokenize"

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(as_messages)] | None = None
    tools: Annotated[tuple[Tool, ...], BeforeValidator(as_tools)] = ()
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if self.prompt is None and self.messages is None:
            message = "`prompt` (a string) or `messages` (a list of messages) is required"
            raise ApiError(400, message, param="prompt", code="missing_field")
        if self.prompt is not None:
            for name in ("messages", "tools", "add_generation_prompt"):
                if getattr(self, name) not in (None, ()):
                    raise invalid(name, f"`{name}` is not allowed beside `prompt`")
        return self


def _token_ids(value: Any) -> tuple[int, ...]:
    if not is_ids(value):
        raise must_be("tokens", value, "detokenize")
    return tuple(value)


class DetokenizeRequest(Part):
    endpoint: ClassVar[Endpoint] = "detokenize"

    model: str | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_token_ids)]
