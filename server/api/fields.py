"""Every request field of the endpoints, and what this server does with it.

This table is the only place that says so: requests are checked against it, error sentences quote
its `allowed` column, the table of docs/api.md is its rendering (`python -m server.api.fields`), so
are /v1/capabilities and the descriptions in /openapi.json, and tests walk it row by row. A field
that is not in it is unknown and refused by name. Fields of one name that differ between endpoints
have a row each.

A row may depend on the settings: `unless` says why the field is refused under the present ones.
That one predicate refuses the field in requests and reports it in /v1/capabilities.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from engine.messages import MAX_LOGPROBS
from server.api import limits
from server.api.services import Services
from server.text.tool_format import tool_format

Endpoint = Literal["completions", "chat", "responses", "tokenize", "detokenize", "speculation"]
Status = Literal["supported", "no-op", "refused"]


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the `endpoints`. `allowed` completes the sentence "`name` must be ...".
    `neutral` are the values of a refused field that mean the same as leaving it out (null always
    does). `unless` gives the reason, a clause, why these settings refuse it, or None."""

    kind: Status
    endpoints: tuple[Endpoint, ...]
    name: str
    allowed: str
    meaning: str
    neutral: tuple[object, ...] = ()
    unless: Callable[[Services], str | None] | None = None

    def status(self, endpoint: Endpoint) -> Status | None:
        """None: the endpoint has no such field."""
        return self.kind if endpoint in self.endpoints else None

    def is_neutral(self, value: object) -> bool:
        """Whether this value says no more than leaving the field out."""
        return value is None or any(
            type(value) is type(same) and value == same for same in self.neutral
        )


COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
CHAT: tuple[Endpoint, ...] = ("chat",)
RESPONSES: tuple[Endpoint, ...] = ("responses",)
TOKENIZE: tuple[Endpoint, ...] = ("tokenize",)
DETOKENIZE: tuple[Endpoint, ...] = ("detokenize",)
SPECULATION: tuple[Endpoint, ...] = ("speculation",)
BOTH = COMPLETIONS + CHAT
GENERATING = BOTH + RESPONSES  # /v1/responses runs on chat: the same row means the same there
CHAT_RESPONSES = CHAT + RESPONSES
CHAT_PROMPT = CHAT + TOKENIZE  # /tokenize of messages is the prompt that chat would run
CHAT_RESPONSES_PROMPT = CHAT_RESPONSES + TOKENIZE
TOKENIZERS = TOKENIZE + DETOKENIZE


supported = partial(FieldRow, "supported")
no_op = partial(FieldRow, "no-op")  # taken, and changes nothing


def refused(endpoints: tuple[Endpoint, ...], name: str, meaning: str, *neutral: object) -> FieldRow:
    allowed = " or ".join(["left out", *map(json.dumps, neutral)])
    return FieldRow("refused", endpoints, name, allowed, meaning, neutral)


def _no_chat_template(services: Services) -> str | None:
    if services.tokenizer.has_chat_template:
        return None
    return "this model has no chat template; use /v1/completions with a plain prompt"


def _no_fill_in(services: Services) -> str | None:
    if services.tokenizer.fill_in is not None:
        return None
    return "the vocabulary of this model has no tokens for fill-in-the-middle"


def _no_variables(services: Services) -> str | None:
    allowed = services.config.server.chat_template_kwargs
    if any(map(services.tokenizer.template_reads, allowed)):
        return None
    return (
        "this model's chat template reads none of the variables that requests may set"
        f" ({', '.join(allowed) or 'none'})"
    )


def _no_effort(services: Services) -> str | None:
    if any(map(services.tokenizer.template_reads, ("reasoning_effort", "enable_thinking"))):
        return None
    return "this model's chat template reads neither reasoning_effort nor enable_thinking"


def _no_tools(services: Services) -> str | None:
    found = tool_format(services.tokenizer, services.config.server.tool_parser)
    return found if isinstance(found, str) else None


LABEL = f"a string of at most {limits.MAX_LABEL_LENGTH} characters"
LOGPROBS = "message.output_text.logprobs"  # of /v1/responses' `include`
ENCRYPTED = "reasoning.encrypted_content"
REASONING_REFUSED = ("summary", "generate_summary", "context", "mode")
NO_REASONING = "must be left out or null, since reasoning is not told apart from text"
NOT_STORED = "No response is stored: send the whole conversation as `input`."
HOSTED = "There are no hosted tools."

# fmt: off
FIELDS: tuple[FieldRow, ...] = (
    supported(GENERATING, "model", "the name of the served model (see /v1/models)",
        "Another name is a 404."),
    supported(COMPLETIONS, "prompt",
        "a string, a list of token ids, or a list of up to 128 strings or lists of token ids;"
        " none of them empty",
        "Each prompt gets `n` choices."),
    supported(CHAT_PROMPT, "messages", f"a list of 1 to {limits.MAX_MESSAGES} messages",
        "Roles system, developer (treated as system), user, assistant, tool; content is a string"
        " or a list of text parts (of the assistant: refusals, too), which are joined by line"
        " breaks; `name` and `tool_call_id` are handed to the chat template. Special tokens that a"
        " message spells out are plain text.", unless=_no_chat_template),
    supported(COMPLETIONS, "max_tokens", "an integer of at least 0",
        "Default 16. Prompt plus `max_tokens` must fit the context. 0 generates nothing: with"
        " `echo` and `logprobs` it scores the prompt."),
    supported(CHAT, "max_tokens", "an integer of at least 1",
        "Default: until the context is full. Prompt plus `max_tokens` must fit the context."),
    supported(CHAT, "max_completion_tokens", "an integer of at least 1",
        "The newer name of `max_tokens`; the two must not disagree."),
    supported(BOTH, "n", f"an integer from 1 to {limits.MAX_N}",
        "Choices per prompt. Choice 0 uses the seed itself, choice i a fixed mix of seed and i."),
    supported(COMPLETIONS, "best_of",
        f"an integer from `n` to {limits.MAX_N}, and equal to `n` with `stream`",
        "So many are generated per prompt; the `n` with the highest log-probability per token are"
        " returned, best first. All of them count as completion tokens."),
    supported(COMPLETIONS, "suffix", "a string, and only without `echo`",
        "What follows the text to generate (fill-in-the-middle), the same for each prompt, for"
        " models whose vocabulary has the tokens for it. Prompt and suffix are plain text here:"
        " special tokens that they spell out are not special. The special tokens of this task end"
        " the text, but for `ignore_eos`.", neutral=("",), unless=_no_fill_in),
    supported(GENERATING, "stream", "true or false", "Server-sent events, closed by `[DONE]`."),
    supported(BOTH, "stream_options",
        'an object with the fields "include_usage" (true or false) and "include_obfuscation"'
        " (false), and only with `stream`",
        "A last chunk with the usage and no choices. Nothing is padded."),
    supported(GENERATING, "stop",
        f"a string or a list of up to {limits.MAX_STOPS} strings, each of 1 to"
        f" {limits.MAX_STOP_LENGTH} characters",
        "Ends the text before the first match."),
    supported(GENERATING, "temperature", "a number from 0 to 2",
        "Default 1; 0 takes the most likely token, and so does anything below 0.0001."),
    supported(GENERATING, "top_p", "a number above 0 and up to 1", "Default 1."),
    supported(GENERATING, "seed",
        "an integer of 64 bits (-9223372036854775808 to 18446744073709551615)",
        "One is drawn when there is none; every reply names the seed it was made with."),
    supported(GENERATING, "presence_penalty", "a number from -2 to 2", "Default 0."),
    supported(GENERATING, "frequency_penalty", "a number from -2 to 2", "Default 0."),
    supported(GENERATING, "logit_bias",
        f"an object of at most {limits.MAX_LOGIT_BIAS} entries, token id (below the vocabulary"
        " size) to a number from -100 to 100",
        "Added to the logits."),
    supported(BOTH, "logprobs", "an integer from 0 to 20 (completions) or true or false (chat)",
        "Of the model itself: before penalties, bias, temperature and filters."),
    supported(CHAT, "top_logprobs", "an integer from 0 to 20, and only with `logprobs`: true",
        "Alternatives per token."),
    supported(COMPLETIONS, "echo", "true or false",
        "The text (and its logprobs, when asked for) begins with the prompt."),
    supported(CHAT_PROMPT, "add_generation_prompt",
        "true or false, and not true with `continue_final_message`",
        "Extension. Default true, with `continue_final_message` false: the prompt ends with the"
        " begin of the assistant's turn."),
    supported(CHAT_PROMPT, "continue_final_message", "true or false",
        "Extension. The reply continues the last message, which is the assistant's and has text;"
        " that text is not repeated."),
    supported(CHAT_RESPONSES_PROMPT, "chat_template_kwargs",
        f"an object of at most {limits.MAX_TEMPLATE_KWARGS} variables, to true, false, a number or"
        " a string",
        "Extension. Variables of the model's chat template: those that the operator allows"
        " (`server.chat_template_kwargs`) and the template reads.",
        neutral=({},), unless=_no_variables),
    refused(CHAT_PROMPT, "chat_template", "Templates are programs; only the model's own is run."),
    supported(CHAT_PROMPT, "reasoning_effort",
        '"none", "minimal", "low", "medium", "high", "xhigh" or "max"',
        'Handed to chat templates that read it. Where a template can only switch reasoning, "none"'
        ' is `enable_thinking`: false; where it cannot even that, "none" alone is allowed.',
        neutral=("none",), unless=_no_effort),
    supported(GENERATING, "top_k", "an integer of at least -1",
        "Extension. Default 0; 0 and -1 are off."),
    supported(GENERATING, "min_p", "a number from 0 to 1", "Extension. Default 0, which is off."),
    supported(GENERATING, "repetition_penalty", "a number from 0.01 to 10",
        "Extension. Default 1, which is off; over prompt and generated tokens."),
    supported(GENERATING, "min_tokens", "an integer of at least 0, and at most `max_tokens`",
        "Extension. No stop token and no stop string before that many tokens."),
    supported(GENERATING, "ignore_eos", "true or false",
        "Extension. Generate through the end-of-text token."),
    supported(GENERATING, "stop_token_ids",
        f"a list of at most {limits.MAX_STOP_TOKEN_IDS} token ids below the vocabulary size",
        "Extension. Tokens that end the text."),
    supported(GENERATING, "include_stop_str_in_output", "true or false",
        "Extension. Keep the stop string or stop token in the text."),
    supported(GENERATING, "skip_special_tokens", "true or false",
        "Extension. Default true: special tokens leave no text."),
    supported(GENERATING, "cache_salt", LABEL,
        "Extension. Only requests of the same salt share cached prompt prefixes."),
    supported(GENERATING, "priority",
        f"an integer from {-limits.MAX_PRIORITY} to {limits.MAX_PRIORITY}",
        "Extension. Default 0; lower is served earlier, and gives way later when the KV cache is"
        " full. Equals are served in the order of arrival."),
    supported(BOTH, "prompt_logprobs",
        f"an integer from 0 to {MAX_LOGPROBS}, and only without `stream`",
        "Extension. Log-probabilities of the prompt's tokens in vLLM's shape, with so many"
        " alternatives: in each choice (completions), beside the choices (chat)."),
    supported(GENERATING, "return_token_ids", "true or false",
        "Extension. `token_ids` of each choice, as many as its completion tokens;"
        " `prompt_token_ids` in each choice (completions) or beside the choices (chat); in streams"
        " `prompt_token_ids` on the first chunk."),
    supported(GENERATING, "prediction",
        'an object {"type": "content", "content": a string or a list of text parts, not empty}',
        "What the reply is expected to be, such as the file to be edited: it is guessed along the"
        " prediction, which changes nothing but the time. Allowed with every other field; an"
        " extension on completions."),
    supported(GENERATING, "speculation",
        'an object {"enabled": true, "max_draft": "auto" or an integer from 1 to the server\'s K,'
        ' "proposers": a list of 1 to 4 of "draft_model", "ngram", "grammar", "prediction", none'
        ' twice}, or {"max_draft": 0} or {"enabled": false} without the others',
        "Extension. Guesses for this request alone: whether, how many at most in a step, and by"
        " whom, in that order; the text is the same whatever it says."),
    supported(GENERATING, "provenance", "true or false",
        "Extension. Each choice lists its tokens' texts with who guessed them: a proposer, or"
        " `target` for those that nobody had guessed."),
    supported(BOTH, "response_format",
        'an object with the field "type": "text", "json_object" or "json_schema", the last with'
        ' "json_schema": {"name", "schema", "description", "strict"}',
        "The reply is such JSON, on one line. A schema is enforced with `strict` or without; one"
        " that cannot be enforced whole is a 400."),
    supported(GENERATING, "structured_outputs",
        'an object with exactly one of "json" (a schema), "regex", "choice" (a list of strings),'
        ' "grammar" (Lark, or EBNF as llama.cpp writes it) and "json_object" (true)',
        "Extension. The text is what that describes, and ends when nothing more can follow."),
    no_op(GENERATING, "user", LABEL, "Not stored."),
    no_op(GENERATING, "metadata",
        f"an object of at most {limits.MAX_METADATA} strings of at most {limits.MAX_LABEL_LENGTH}"
        f" characters, with names of at most {limits.MAX_METADATA_KEY}",
        "Not stored."),
    no_op(BOTH, "store", "true or false", "Nothing is ever stored."),
    no_op(GENERATING, "service_tier", '"auto", "default", "flex", "scale", "priority" or "fast"',
        'There is one tier, and replies to requests with this field say "default".'),
    no_op(GENERATING, "safety_identifier", LABEL, "Not stored."),
    no_op(GENERATING, "prompt_cache_key", LABEL, "The prefix cache needs no hint."),
    supported(CHAT_PROMPT, "tools",
        f'a list of at most {limits.MAX_TOOLS} objects with the type "function" and a function'
        " of name, description, parameters (a JSON schema) and strict; no name twice",
        "Functions that the model may call; needs a chat template that knows tools. The arguments"
        " of `strict` tools are held to their schema by a grammar.",
        neutral=([],), unless=_no_tools),
    refused(COMPLETIONS, "tools", "Tools are for chat.", []),
    supported(CHAT_PROMPT, "tool_choice",
        '"none", "auto", "required", an object of the type "function" that names one, or one of the'
        ' type "allowed_tools"; all but "none" only with `tools`',
        'Default "auto", or "none" without `tools`. "none": the model is not told of the tools.'
        ' "required": calls and nothing else, by a grammar. A named function is called once.',
        neutral=("none",)),
    refused(COMPLETIONS, "tool_choice", "Tools are for chat.", "none"),
    supported(CHAT_RESPONSES, "parallel_tool_calls", "true or false, and only with `tools`",
        "Whether a reply may hold several calls; default true. false: at most one, by a grammar."),
    refused(COMPLETIONS, "parallel_tool_calls", "Tools are for chat."),
    refused(BOTH, "functions", "The old form of `tools`; use `tools`.", []),
    refused(BOTH, "function_call", "The old form of `tool_choice`; use `tool_choice`.", "none"),
    refused(BOTH, "audio", "Audio output."),
    refused(BOTH, "modalities", "Other output than text.", ["text"]),
    refused(BOTH, "verbosity", "Verbosity control.", "medium"),
    refused(BOTH, "web_search_options", "Web search."),
    refused(GENERATING, "moderation", "Moderation."),
    refused(GENERATING, "prompt_cache_options", "Cache control."),
    refused(GENERATING, "prompt_cache_retention", "Cache control.", "in_memory"),
    supported(RESPONSES, "input", f"a string or a list of 1 to {limits.MAX_MESSAGES} items",
        "Items: messages (roles user, system, developer, assistant; content a string or a list"
        " of input_text and output_text parts), function_call and function_call_output. Ids"
        " and statuses of items are not stored.", unless=_no_chat_template),
    supported(RESPONSES, "instructions", "a string", "A system message before the input."),
    supported(RESPONSES, "max_output_tokens", "an integer of at least 1",
        "Until the context is full by default. Input plus output must fit the context."),
    supported(RESPONSES, "include", f'a list of "{LOGPROBS}" and "{ENCRYPTED}"',
        "Log-probabilities of the text. Reasoning items are never made, so nothing is"
        " encrypted in them."),
    supported(RESPONSES, "top_logprobs",
        f'an integer from 0 to 20, and only with `include`: ["{LOGPROBS}"]',
        "Alternatives per token."),
    supported(RESPONSES, "text",
        'an object with "format" (an object of the type text, json_object or json_schema) and'
        ' "verbosity"',
        "`format` does what `response_format` does for chat, `verbosity` what it does there."),
    supported(RESPONSES, "reasoning", 'an object with "effort"',
        "`effort` does what `reasoning_effort` does for chat. Each of"
        f" {', '.join(f'`{name}`' for name in REASONING_REFUSED)} {NO_REASONING}.",
        neutral=({},), unless=_no_effort),
    supported(RESPONSES, "tools",
        f'a list of at most {limits.MAX_TOOLS} objects with the type "function", name, description,'
        " parameters and strict",
        "As for chat. There are no hosted tools.", neutral=([],), unless=_no_tools),
    supported(RESPONSES, "tool_choice",
        '"none", "auto", "required", {"type": "function", "name": ...} or {"type":'
        ' "allowed_tools", "mode": ..., "tools": [...]}',
        "As for chat.", neutral=("none",)),
    supported(RESPONSES, "stream_options",
        'an object with the field "include_obfuscation" (false), and only with `stream`',
        "Nothing is padded."),
    supported(RESPONSES, "truncation", '"disabled"',
        "Input that does not fit is a 400, never cut."),
    refused(RESPONSES, "store", "Nothing is ever stored.", False),
    refused(RESPONSES, "previous_response_id", NOT_STORED),
    refused(RESPONSES, "conversation", NOT_STORED),
    refused(RESPONSES, "background", "Responses are made while you wait.", False),
    refused(RESPONSES, "prompt", "There are no stored prompt templates."),
    refused(RESPONSES, "max_tool_calls", HOSTED),
    refused(RESPONSES, "context_management", "Nothing is compacted.", []),
    refused(RESPONSES, "access_programs", "There are none."),
    refused(RESPONSES, "image", "Text only."),
    supported(TOKENIZERS, "model", "the name of the served model (see /v1/models)",
        "May be left out; another name is a 404."),
    supported(TOKENIZE, "prompt", "a string, and only without `messages`", "The text to tokenise."),
    supported(TOKENIZE, "add_special_tokens", "true or false",
        "Default true for a prompt, as /v1/completions does; false for messages, whose template"
        " writes them."),
    supported(TOKENIZE, "return_token_strs", "true or false",
        "Each token's own text too, as logprobs show it."),
    supported(DETOKENIZE, "tokens",
        "a list of token ids below the vocabulary size, at most as many as the context holds",
        "Special tokens are written out."),
    supported(SPECULATION, "mode", 'one of "auto", "fixed", "off"',
        "Who chooses K: the configured controller, or the operator."),
    supported(SPECULATION, "k",
        "an integer from 1 to the server's K, and only with `mode` \"fixed\" (for no guesses ask"
        ' for `mode` "off")',
        "The K of every step."),
)
# fmt: on

ROWS: Mapping[Endpoint, Mapping[str, FieldRow]] = {
    endpoint: {row.name: row for row in FIELDS if endpoint in row.endpoints}
    for endpoint in get_args(Endpoint)
}
TABLES: tuple[tuple[Endpoint, ...], ...] = (GENERATING, TOKENIZERS)


def markdown() -> str:
    """The tables of docs/api.md: one line per field."""
    return "\n\n".join(map(_table, TABLES))


def _table(endpoints: tuple[Endpoint, ...]) -> str:
    lines = [["field", *endpoints, "allowed", "meaning"], ["---"] * (len(endpoints) + 3)]
    for row in FIELDS:
        status = [row.status(endpoint) for endpoint in endpoints]
        if any(status):
            lines.append([f"`{row.name}`", *(s or "-" for s in status), row.allowed, row.meaning])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
