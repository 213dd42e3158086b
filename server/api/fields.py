"""Every request field of the endpoints, and what this server does with it.

This table is the only place that says so: requests are checked against it, error sentences quote
its `allowed` column, docs/api.md renders it (`python -m server.api.fields`), so does
/v1/capabilities, and tests walk it row by row. A field that is not in it is unknown and refused by
name. Fields of one name that differ between endpoints have a row each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import get_args

from engine.messages import MAX_LOGPROBS
from server.api.field_row import Endpoint, Facts, FieldRow, both
from server.api.fields_idle import NO_OP_ROWS, REFUSED_ROWS
from server.api.fields_responses import with_responses
from server.api.fields_template import TEMPLATE_ROWS
from server.api.fields_tokenize import with_tokenize
from server.api.fields_tools import TOOL_ROWS
from server.api.limits import (
    MAX_LABEL_LENGTH,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PRIORITY,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)


def _no_chat_template(facts: Facts) -> str | None:
    if facts.tokenizer.has_chat_template:
        return None
    return "this model has no chat template; use /v1/completions with a plain prompt"


def _no_fill_in(facts: Facts) -> str | None:
    if facts.tokenizer.fill_in is not None:
        return None
    return "the vocabulary of this model has no tokens for fill-in-the-middle"


CHAT_AND_COMPLETIONS: tuple[FieldRow, ...] = (
    both("model", "the name of the served model (see /v1/models)", "Another name is a 404."),
    FieldRow(
        "prompt",
        "supported",
        None,
        "a string, a list of token ids, or a list of up to 128 strings or lists of token ids;"
        " none of them empty",
        "Each prompt gets `n` choices.",
    ),
    FieldRow(
        "messages",
        None,
        "supported",
        f"a list of 1 to {MAX_MESSAGES} messages",
        "Roles system, developer (treated as system), user, assistant, tool; content is a string"
        " or a list of text parts (of the assistant: refusals, too), which are joined by line"
        " breaks; `name` and `tool_call_id` are handed to the chat template. Special tokens that a"
        " message spells out are plain text.",
        unless=_no_chat_template,
    ),
    FieldRow(
        "max_tokens",
        "supported",
        None,
        "an integer of at least 0",
        "Default 16. Prompt plus `max_tokens` must fit the context. 0 generates nothing: with"
        " `echo` and `logprobs` it scores the prompt.",
    ),
    FieldRow(
        "max_tokens",
        None,
        "supported",
        "an integer of at least 1",
        "Default: until the context is full. Prompt plus `max_tokens` must fit the context.",
    ),
    FieldRow(
        "max_completion_tokens",
        None,
        "supported",
        "an integer of at least 1",
        "The newer name of `max_tokens`; the two must not disagree.",
    ),
    both(
        "n",
        f"an integer from 1 to {MAX_N}",
        "Choices per prompt. Choice 0 uses the seed itself, choice i a fixed mix of seed and i.",
    ),
    FieldRow(
        "best_of",
        "supported",
        None,
        f"an integer from `n` to {MAX_N}, and equal to `n` with `stream`",
        "So many are generated per prompt; the `n` with the highest log-probability per token are"
        " returned, best first. All of them count as completion tokens.",
    ),
    FieldRow(
        "suffix",
        "supported",
        None,
        "a string, and only without `echo`",
        "What follows the text to generate (fill-in-the-middle), the same for each prompt, for"
        " models whose vocabulary has the tokens for it. Prompt and suffix are plain text here:"
        " special tokens that they spell out are not special. The special tokens of this task end"
        " the text, but for `ignore_eos`.",
        ("",),
        unless=_no_fill_in,
    ),
    both("stream", "true or false", "Server-sent events, closed by `[DONE]`."),
    both(
        "stream_options",
        'an object with the fields "include_usage" (true or false) and "include_obfuscation"'
        " (false), and only with `stream`",
        "A last chunk with the usage and no choices. Nothing is padded.",
    ),
    both(
        "stop",
        f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_LENGTH}"
        " characters",
        "Ends the text before the first match.",
    ),
    both(
        "temperature",
        "a number from 0 to 2",
        "Default 1; 0 takes the most likely token, and so does anything below 0.0001.",
    ),
    both("top_p", "a number above 0 and up to 1", "Default 1."),
    both(
        "seed",
        "an integer of 64 bits (-9223372036854775808 to 18446744073709551615)",
        "One is drawn when there is none; every reply names the seed it was made with.",
    ),
    both("presence_penalty", "a number from -2 to 2", "Default 0."),
    both("frequency_penalty", "a number from -2 to 2", "Default 0."),
    both(
        "logit_bias",
        f"an object of at most {MAX_LOGIT_BIAS} entries, token id (below the vocabulary size) to"
        " a number from -100 to 100",
        "Added to the logits.",
    ),
    FieldRow(
        "logprobs",
        "supported",
        "supported",
        "an integer from 0 to 20 (completions) or true or false (chat)",
        "Of the model itself: before penalties, bias, temperature and filters.",
    ),
    FieldRow(
        "top_logprobs",
        None,
        "supported",
        "an integer from 0 to 20, and only with `logprobs`: true",
        "Alternatives per token.",
    ),
    FieldRow(
        "echo",
        "supported",
        None,
        "true or false",
        "The text (and its logprobs, when asked for) begins with the prompt.",
    ),
    *TEMPLATE_ROWS,
    both("top_k", "an integer of at least -1", "Extension. Default 0; 0 and -1 are off."),
    both("min_p", "a number from 0 to 1", "Extension. Default 0, which is off."),
    both(
        "repetition_penalty",
        "a number from 0.01 to 10",
        "Extension. Default 1, which is off; over prompt and generated tokens.",
    ),
    both(
        "min_tokens",
        "an integer of at least 0, and at most `max_tokens`",
        "Extension. No stop token and no stop string before that many tokens.",
    ),
    both("ignore_eos", "true or false", "Extension. Generate through the end-of-text token."),
    both(
        "stop_token_ids",
        f"a list of at most {MAX_STOP_TOKEN_IDS} token ids below the vocabulary size",
        "Extension. Tokens that end the text.",
    ),
    both(
        "include_stop_str_in_output",
        "true or false",
        "Extension. Keep the stop string or stop token in the text.",
    ),
    both(
        "skip_special_tokens",
        "true or false",
        "Extension. Default true: special tokens leave no text.",
    ),
    both(
        "cache_salt",
        f"a string of at most {MAX_LABEL_LENGTH} characters",
        "Extension. Only requests of the same salt share cached prompt prefixes.",
    ),
    both(
        "priority",
        f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
        "Extension. Default 0; lower is served earlier, and gives way later when the KV cache is"
        " full. Equals are served in the order of arrival.",
    ),
    both(
        "prompt_logprobs",
        f"an integer from 0 to {MAX_LOGPROBS}, and only without `stream`",
        "Extension. Log-probabilities of the prompt's tokens in vLLM's shape, with so many"
        " alternatives: in each choice (completions), beside the choices (chat).",
    ),
    both(
        "return_token_ids",
        "true or false",
        "Extension. `token_ids` of each choice, as many as its completion tokens;"
        " `prompt_token_ids` in each choice (completions) or beside the choices (chat); in streams"
        " `prompt_token_ids` on the first chunk.",
    ),
    both(
        "prediction",
        'an object {"type": "content", "content": a string or a list of text parts, not empty}',
        "What the reply is expected to be, such as the file to be edited: it is guessed along the"
        " prediction, which changes nothing but the time. Allowed with every other field; an"
        " extension on completions.",
    ),
    both(
        "speculation",
        'an object {"enabled": true, "max_draft": "auto" or an integer from 1 to the server\'s K,'
        ' "proposers": a list of 1 to 4 of "draft_model", "ngram", "grammar", "prediction", none'
        ' twice}, or {"max_draft": 0} or {"enabled": false} without the others',
        "Extension. Guesses for this request alone: whether, how many at most in a step, and by"
        " whom, in that order; the text is the same whatever it says.",
    ),
    both(
        "provenance",
        "true or false",
        "Extension. Each choice lists its tokens' texts with who guessed them: a proposer, or"
        " `target` for those that nobody had guessed.",
    ),
    both(
        "response_format",
        'an object with the field "type": "text", "json_object" or "json_schema", the last with'
        ' "json_schema": {"name", "schema", "description", "strict"}',
        "The reply is such JSON, on one line. A schema is enforced with `strict` or without; one"
        " that cannot be enforced whole is a 400.",
    ),
    both(
        "structured_outputs",
        'an object with exactly one of "json" (a schema), "regex", "choice" (a list of strings),'
        ' "grammar" (Lark, or EBNF as llama.cpp writes it) and "json_object" (true)',
        "Extension. The text is what that describes, and ends when nothing more can follow.",
    ),
    *NO_OP_ROWS,
    *TOOL_ROWS,
    *REFUSED_ROWS,
)
FIELDS = with_tokenize(with_responses(CHAT_AND_COMPLETIONS))

ROWS: Mapping[Endpoint, Mapping[str, FieldRow]] = {
    endpoint: {row.name: row for row in FIELDS if row.status(endpoint) is not None}
    for endpoint in get_args(Endpoint)
}


TABLES: tuple[tuple[Endpoint, ...], ...] = (
    ("completions", "chat", "responses"),
    ("tokenize", "detokenize"),
)


def markdown() -> str:
    """The documents' tables: one line per field."""
    return "\n\n".join(map(_table, TABLES))


def _table(endpoints: tuple[Endpoint, ...]) -> str:
    lines = [["field", *endpoints, "allowed", "meaning"], ["---"] * (len(endpoints) + 3)]
    for row in FIELDS:
        told = [row.status(endpoint) for endpoint in endpoints]
        if any(told):
            lines.append([f"`{row.name}`", *(s or "-" for s in told), row.allowed, row.meaning])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
