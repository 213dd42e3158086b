"""What each request field may hold, in JSON Schema, where pydantic's own model does not say it.

Facts of one engine (vocabulary, context) and rules between fields are told in words: they are in
the table of fields, whose sentences become the descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.messages import PROPOSERS
from server.api import limits
from server.api.fields import REASONING_REFUSED, Endpoint
from server.api.openapi_terms import (
    ANY_OBJECT,
    BOOLEAN,
    COUNT,
    NULL,
    NUMBER,
    TEXT,
    TOKEN_ID,
    Schema,
    any_of,
    array,
    closed,
    enum,
    mapping,
    or_null,
    string,
)
from server.api.schema_responses import STATUSES
from server.api.tools import FUNCTION_NAME

LABEL = string(limits.MAX_LABEL_LENGTH)
STOP = string(limits.MAX_STOP_LENGTH, shortest=1)
IDS = array(TOKEN_ID)
NAME = {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}

TEXT_PART = closed({"type": enum("text"), "text": TEXT})
REFUSAL_PART = closed({"type": enum("refusal"), "refusal": TEXT})
CALL = closed(
    {
        "id": string(limits.MAX_LABEL_LENGTH, shortest=1),
        "type": enum("function"),
        "function": closed({"name": NAME, "arguments": TEXT}),
    }
)
CALLS = array(CALL, most=limits.MAX_CALLS)
SAID = any_of(TEXT, array(any_of(TEXT_PART, REFUSAL_PART), least=1))
MESSAGE = any_of(
    closed(
        {
            "role": enum("system", "developer", "user"),
            "content": any_of(TEXT, array(TEXT_PART, least=1)),
        },
        name=or_null(LABEL),
    ),
    closed({"role": enum("assistant"), "content": SAID}, name=or_null(LABEL), tool_calls=CALLS),
    closed({"role": enum("assistant"), "refusal": TEXT}, content=enum(None), name=LABEL),
    closed(
        {"role": enum("assistant"), "tool_calls": {**CALLS, "minItems": 1}},
        content=or_null(SAID),
    ),
    closed(
        {
            "role": enum("tool"),
            "content": any_of(TEXT, array(TEXT_PART, least=1)),
            "tool_call_id": LABEL,
        },
        name=or_null(LABEL),
    ),
)
FUNCTION = {
    "description": or_null(string(limits.MAX_DESCRIPTION)),
    "parameters": or_null(ANY_OBJECT),
    "strict": or_null(BOOLEAN),
}
TOOL = closed({"type": enum("function"), "function": closed({"name": NAME}, **FUNCTION)})
NAMED = closed({"type": enum("function"), "function": closed({"name": NAME})})
ALLOWED = {"mode": enum("auto", "required"), "tools": array(NAMED, least=1, most=limits.MAX_TOOLS)}
TOOL_CHOICE = any_of(
    enum("none", "auto", "required"),
    NAMED,
    closed({"type": enum("allowed_tools"), "allowed_tools": closed(ALLOWED)}),
)
FLAT_NAMED = closed({"type": enum("function"), "name": NAME})
FLAT_ALLOWED = {
    "type": enum("allowed_tools"),
    "mode": enum("auto", "required"),
    "tools": array(FLAT_NAMED, least=1, most=limits.MAX_TOOLS),
}

SCHEMA_NAME = {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{limits.MAX_SCHEMA_NAME}}}$"}
JSON_SCHEMA = {"name": SCHEMA_NAME, "schema": ANY_OBJECT}
JSON_SCHEMA_MORE = {
    "description": or_null(string(limits.MAX_DESCRIPTION)),
    "strict": or_null(BOOLEAN),
}
RESPONSE_FORMAT = any_of(
    closed({"type": enum("text", "json_object")}),
    closed({"type": enum("json_schema"), "json_schema": closed(JSON_SCHEMA, **JSON_SCHEMA_MORE)}),
)
TEXT_FORMAT = any_of(
    closed({"type": enum("text", "json_object")}),
    closed({"type": enum("json_schema"), **JSON_SCHEMA}, **JSON_SCHEMA_MORE),
)
STRUCTURED = any_of(
    closed({"json": any_of(ANY_OBJECT, TEXT)}),
    closed({"regex": string(shortest=1)}),
    closed({"choice": array(string(shortest=1), least=1, most=limits.MAX_CHOICES)}),
    closed({"grammar": string(shortest=1)}),
    closed({"json_object": enum(True)}),
)
SPECULATION = any_of(
    closed({"enabled": enum(False)}, max_draft=NULL, proposers=NULL),
    closed({"max_draft": enum(0)}, enabled=or_null(enum(True)), proposers=NULL),
    closed(
        {},
        enabled=or_null(enum(True)),
        max_draft=or_null(any_of({**COUNT, "minimum": 1}, enum("auto"))),
        proposers=or_null(
            {**array(enum(*PROPOSERS), least=1, most=len(PROPOSERS)), "uniqueItems": True}
        ),
    ),
)
PREDICTION = closed(
    {"type": enum("content"), "content": any_of(string(shortest=1), array(TEXT_PART, least=1))}
)

INPUT_PART = closed(
    {"type": enum("input_text", "output_text"), "text": TEXT}, logprobs=array(ANY_OBJECT)
)
ITEM = {"id": or_null(LABEL), "status": or_null(enum(*STATUSES))}
ITEM_TEXT = any_of(TEXT, array(INPUT_PART, least=1))
INPUT_MESSAGE = closed(
    {"role": enum("user", "system", "developer", "assistant"), "content": ITEM_TEXT},
    type=enum("message"),
    **ITEM,
)
INPUT_CALL = closed(
    {"type": enum("function_call"), "call_id": LABEL, "name": NAME, "arguments": TEXT}, **ITEM
)
INPUT_OUTPUT = closed(
    {"type": enum("function_call_output"), "call_id": LABEL, "output": ITEM_TEXT}, **ITEM
)
INPUT_ITEM = any_of(INPUT_MESSAGE, INPUT_CALL, INPUT_OUTPUT)

COMMON: Mapping[str, Schema] = {
    "stop": any_of(STOP, array(STOP, most=limits.MAX_STOPS)),
    "logit_bias": mapping(
        {**NUMBER, "minimum": -100, "maximum": 100},
        most=limits.MAX_LOGIT_BIAS,
        names={"pattern": "^[0-9]{1,10}$"},
    ),
    "stop_token_ids": array(TOKEN_ID, most=limits.MAX_STOP_TOKEN_IDS),
    "metadata": mapping(LABEL, most=limits.MAX_METADATA, names=string(limits.MAX_METADATA_KEY)),
    "stream_options": closed({}, include_usage=BOOLEAN, include_obfuscation=enum(False)),
    "messages": array(MESSAGE, least=1, most=limits.MAX_MESSAGES),
    "tools": array(TOOL, most=limits.MAX_TOOLS),
    "tool_choice": TOOL_CHOICE,
    "chat_template_kwargs": mapping(
        any_of(BOOLEAN, NUMBER, LABEL), most=limits.MAX_TEMPLATE_KWARGS
    ),
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED,
    "prediction": PREDICTION,
    "speculation": SPECULATION,
    "tokens": IDS,
}
PROMPT = any_of(string(shortest=1), {**IDS, "minItems": 1})
OWN: Mapping[Endpoint, Mapping[str, Schema]] = {
    "completions": {
        "prompt": any_of(PROMPT, array(PROMPT, least=1, most=limits.MAX_PROMPTS)),
    },
    "responses": {
        "input": any_of(TEXT, array(INPUT_ITEM, least=1, most=limits.MAX_MESSAGES)),
        "text": closed({}, format=or_null(TEXT_FORMAT), verbosity=or_null(TEXT)),
        "reasoning": closed({}, effort=or_null(TEXT), **dict.fromkeys(REASONING_REFUSED, NULL)),
        "include": array(enum("message.output_text.logprobs", "reasoning.encrypted_content")),
        "tools": array(
            closed({"type": enum("function"), "name": NAME}, **FUNCTION), most=limits.MAX_TOOLS
        ),
        "tool_choice": any_of(enum("none", "auto", "required"), FLAT_NAMED, closed(FLAT_ALLOWED)),
        "stream_options": closed({}, include_obfuscation=enum(False)),
    },
}


def told(endpoint: Endpoint, name: str) -> Schema | None:
    """The schema of a field, or None where its type in the model says it all."""
    return OWN.get(endpoint, {}).get(name) or COMMON.get(name)
