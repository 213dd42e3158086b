"""Fields with entries: lists and objects, read in one pass and bounded before they are walked."""

from __future__ import annotations

from typing import Any

from server.api.errors import invalid
from server.api.explain import must_be, shown
from server.api.limits import (
    MAX_LABEL_LENGTH,
    MAX_LOGIT_BIAS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_PROMPTS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPLATE_KWARGS,
)

Prompt = str | list[int]
TemplateValue = bool | int | float | str


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
            allowed = f"a string of at most {MAX_LABEL_LENGTH} characters"
            raise invalid(path, f"`{path}` must be {allowed}, but {shown(text)} was given")
    return value


def as_template_kwargs(value: Any) -> dict[str, TemplateValue]:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise must_be("chat_template_kwargs", value)
    for name, given in value.items():
        path = f"chat_template_kwargs.{name[:64]}"
        fits = len(given) <= MAX_LABEL_LENGTH if isinstance(given, str) else True
        if not isinstance(given, bool | int | float | str) or given != given or not fits:
            allowed = f"true, false, a number or a string of at most {MAX_LABEL_LENGTH} characters"
            raise invalid(path, f"`{path}` must be {allowed}, but {shown(given)} was given")
    return value


def as_stop_token_ids(value: Any) -> tuple[int, ...]:
    if not is_ids(value) or len(value) > MAX_STOP_TOKEN_IDS:
        raise must_be("stop_token_ids", value)
    return tuple(value)


def is_ids(value: Any) -> bool:
    # One pass in C: a body may hold millions, and other streams wait meanwhile.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or many, always as a tuple of them."""
    many = value if isinstance(value, list) and not (value and is_ids(value)) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise must_be("prompt", value)
    for i, prompt in enumerate(many):
        path = "prompt" if many is not value else f"prompt[{i}]"
        if not (isinstance(prompt, str) or is_ids(prompt)):
            raise must_be("prompt", value)
        if not prompt:
            raise invalid(path, f"`{path}` is empty; a prompt needs at least one token")
    return tuple(many)
