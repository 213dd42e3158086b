"""Rows of the field table about tools."""

from __future__ import annotations

from server.api.field_row import Facts, FieldRow, refused
from server.api.limits import MAX_TOOLS
from server.text.tools.formats import tool_format


def _no_tools(facts: Facts) -> str | None:
    found = tool_format(facts.tokenizer, facts.config.server.tool_parser)
    return found if isinstance(found, str) else None


def _chat(name: str, allowed: str, meaning: str, *neutral: object, needs_tools: bool) -> FieldRow:
    unless = _no_tools if needs_tools else None
    return FieldRow(name, None, "supported", allowed, meaning, neutral, unless=unless)


def _not_on_completions(name: str, said: str, *neutral: object) -> FieldRow:
    return FieldRow(name, "refused", None, said, "Tools are for chat.", neutral)


TOOL_ROWS: tuple[FieldRow, ...] = (
    _chat(
        "tools",
        f'a list of at most {MAX_TOOLS} objects with the type "function" and a function'
        " of name, description, parameters (a JSON schema) and strict; no name twice",
        "Functions that the model may call; needs a chat template that knows tools. The arguments"
        " of `strict` tools are held to their schema by a grammar.",
        [],
        (),  # the same, once read
        needs_tools=True,
    ),
    _not_on_completions("tools", "left out or []", []),
    _chat(
        "tool_choice",
        '"none", "auto", "required", an object of the type "function" that names one, or one of the'
        ' type "allowed_tools"; all but "none" only with `tools`',
        'Default "auto", or "none" without `tools`. "none": the model is not told of the tools.'
        ' "required": calls and nothing else, by a grammar. A named function is called once.',
        "none",
        needs_tools=False,
    ),
    _not_on_completions("tool_choice", 'left out or "none"', "none"),
    _chat(
        "parallel_tool_calls",
        "true or false, and only with `tools`",
        "Whether a reply may hold several calls; default true. false: at most one, by a grammar.",
        needs_tools=False,
    ),
    _not_on_completions("parallel_tool_calls", "left out"),
    refused("functions", "The old form of `tools`; use `tools`.", []),
    refused("function_call", "The old form of `tool_choice`; use `tool_choice`.", "none"),
)
