"""Request bodies of /tokenize and /detokenize. Names and meaning: `server.api.fields_tokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from server.api.errors import ApiError, invalid
from server.api.explain import check_names, explain, must_be
from server.api.fields import ROWS
from server.api.schema import Part
from server.api.schema_chat import ChatRequest
from server.api.schema_values import is_ids


class TokenizeRequest(Part):
    """Of a prompt, or (`chat`) of what a chat request would run."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


def read_tokenize(data: dict[str, Any]) -> tuple[TokenizeRequest, ChatRequest | None]:
    """The request, and the chat request whose prompt it asks for, if not `prompt`'s."""
    given = {name: value for name, value in data.items() if value is not None}
    kept = check_names(given, "tokenize")
    shared = {n: v for n, v in kept.items() if ROWS["chat"].get(n) is ROWS["tokenize"][n]}
    own = {name: value for name, value in kept.items() if name not in shared}
    try:
        request = TokenizeRequest.model_validate(own)
        if request.prompt is None and "messages" not in shared:
            message = "`prompt` (a string) or `messages` (a list of messages) is required"
            raise ApiError(400, message, param="prompt", code="missing_field")
        if request.prompt is None:
            return request, ChatRequest.model_validate({"model": "", **shared})
    except ValidationError as error:
        raise explain(error, "tokenize") from None
    if shared:
        name = next(iter(shared))
        raise invalid(name, f"`{name}` is not allowed beside `prompt`")
    return request, None


def _token_ids(value: Any) -> tuple[int, ...]:
    if not is_ids(value):
        raise must_be("tokens", value, "detokenize")
    return tuple(value)


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_token_ids)]
