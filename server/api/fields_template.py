"""Rows of the fields that act on the chat template."""

from __future__ import annotations

from server.api.field_row import Facts, FieldRow
from server.api.limits import MAX_TEMPLATE_KWARGS


def _no_variables(facts: Facts) -> str | None:
    allowed = facts.config.server.chat_template_kwargs
    if any(map(facts.tokenizer.template_reads, allowed)):
        return None
    return (
        "this model's chat template reads none of the variables that requests may set"
        f" ({', '.join(allowed) or 'none'})"
    )


def _no_effort(facts: Facts) -> str | None:
    if any(map(facts.tokenizer.template_reads, ("reasoning_effort", "enable_thinking"))):
        return None
    return "this model's chat template reads neither reasoning_effort nor enable_thinking"


TEMPLATE_ROWS: tuple[FieldRow, ...] = (
    FieldRow(
        "add_generation_prompt",
        None,
        "supported",
        "true or false, and not true with `continue_final_message`",
        "Extension. Default true, with `continue_final_message` false: the prompt ends with the"
        " begin of the assistant's turn.",
    ),
    FieldRow(
        "continue_final_message",
        None,
        "supported",
        "true or false",
        "Extension. The reply continues the last message, which is the assistant's and has text;"
        " that text is not repeated.",
    ),
    FieldRow(
        "chat_template_kwargs",
        None,
        "supported",
        f"an object of at most {MAX_TEMPLATE_KWARGS} variables, to true, false, a number or a"
        " string",
        "Extension. Variables of the model's chat template: those that the operator allows"
        " (`server.chat_template_kwargs`) and the template reads.",
        ({},),
        unless=_no_variables,
    ),
    FieldRow(
        "chat_template",
        None,
        "refused",
        "left out",
        "Templates are programs; only the model's own is run.",
    ),
    FieldRow(
        "reasoning_effort",
        None,
        "supported",
        '"none", "minimal", "low", "medium", "high", "xhigh" or "max"',
        'Handed to chat templates that read it. Where a template can only switch reasoning, "none"'
        ' is `enable_thinking`: false; where it cannot even that, "none" alone is allowed.',
        ("none",),
        unless=_no_effort,
    ),
)
