"""Request bodies of /v1/chat/completions and /v1/completions, and what they have in common.

A list that may be long is refused at its first bad entry (`fail_fast`), so that refusals are fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.config import PROPOSERS, ProposerName
from engine.messages import MAX_LOGPROBS, Grammar
from server.api import limits
from server.api.constraints import (
    Choices,
    Constraint,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    guided,
)
from server.api.errors import invalid, missing
from server.api.fields import (
    Refused,
    described,
    no_chat_template,
    no_effort,
    no_fill_in,
    no_priority,
    no_tools,
    no_variables,
    refused,
)
from server.api.messages import (
    Message,
    TextPart,
    ToolChoice,
    ToolChoiceBody,
    Tools,
    as_template_sees,
    check_tools,
    tool_choice,
)
from server.api.request import Label, RequestBody, RequestObject, Source, fault, wrong
from server.observe.exchange import LABEL


def at_most(count: int) -> BeforeValidator:
    """Return a validator that counts the members of an object before they are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError
        return value

    return BeforeValidator(check)


def _by_token_id(bias: dict[str, float]) -> dict[str, float]:
    seen: set[int] = set()
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise fault("", f": {key[:20]!r} is not a token id")
        if int(key) in seen:  # in another spelling, such as 07
            raise fault("", f"names the token id {int(key)} twice")
        seen.add(int(key))
    return bias


# /openapi.json adds bounds and names of the running server to schemas with these titles.
ModelName = Annotated[str, Field(title="ModelName")]
TokenId = Annotated[int, Field(ge=0, title="TokenId")]
Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
ManyStops = Annotated[list[Stop], Field(max_length=limits.MAX_STOPS, fail_fast=True)]
Stops = Annotated[
    ManyStops,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=Stop | ManyStops,
    ),
]
StopTokens = Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS, fail_fast=True)]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=limits.MAX_LOGIT_BIAS),
    at_most(limits.MAX_LOGIT_BIAS),
    AfterValidator(_by_token_id),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=limits.MAX_METADATA_KEY)], Label],
    Field(max_length=limits.MAX_METADATA),
    at_most(limits.MAX_METADATA),
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Fields of endpoints that share no class.
# fmt: off
OptionalModel = Annotated[ModelName, described(..., "May be left out; another name is a 404.",
    "the name of the served model (see /v1/models)")]
Messages = Annotated[list[Message],
    Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True),
    described(...,
        "Roles system, developer (treated as system), user, assistant, tool. Content is a string or"
        " a list of text parts (of the assistant: refusals, too), joined by line breaks. `name` and"
        " the assistant's `reasoning_content` (or `reasoning`) are for chat templates that read"
        " them. `cache_control`, of a message, part or tool, is a hint and no-op: every prompt is"
        " cached while there is room. Special tokens that a message spells out are plain text.",
        f"a list of 1 to {limits.MAX_MESSAGES} messages", unless=no_chat_template)]
TemplateVariables = Annotated[dict[str, bool | int | float | Label],
    Field(max_length=limits.MAX_TEMPLATE_KWARGS), at_most(limits.MAX_TEMPLATE_KWARGS),
    described(...,
        "Extension. Variables that the model's chat template reads and the operator allows"
        " (`server.chat_template_kwargs`).",
        f"an object of at most {limits.MAX_TEMPLATE_KWARGS} variables, to true, false, a number or"
        " a string", neutral=({},), unless=no_variables)]
ParallelCalls = Annotated[bool | None, described(...,
        "Whether a reply may hold several calls; default true. false: at most one, by a grammar.")]
# fmt: on


class StreamOptions(RequestObject):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(RequestObject):
    type: Literal["content"]
    content: Source | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    @property
    def text(self) -> str:
        """Return the content; parts are joined without a separator."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Keep = Literal[-1] | Annotated[int, Field(ge=1, le=limits.MAX_LENGTH_FIELD)]
OLD_SPELLING = 'Extension. Older spelling of `structured_outputs`: {{"{}": ...}}.'
SPECIAL_TOKENS = "Extension. A prompt begins with the tokens that the tokenizer adds to any text."


class Resume(RequestObject):
    """The part of an interrupted reply that the client has received."""

    token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_LENGTH_FIELD, fail_fast=True)]
    seed: Seed | None = None
    system_fingerprint: Label | None = None


class SpeculationOptions(RequestObject):
    """How to speculate for one request. `proposers` None: the server's default."""

    enabled: bool = True
    max_draft: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    proposers: (
        Annotated[
            list[ProposerName],
            Field(min_length=1, max_length=len(PROPOSERS), json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        beside = [name for name in ("max_draft", "proposers") if name in self.model_fields_set]
        if beside and not self.enabled:
            raise fault(beside[0], "is not allowed with `speculation.enabled`: false")
        if self.max_draft == 0 and self.proposers is not None:
            raise fault("proposers", "is not allowed with `speculation.max_draft`: 0")
        for i, name in enumerate(self.proposers or ()):
            if name in (self.proposers or ())[:i]:
                raise fault(f"proposers[{i}]", f": {name} is named already")
        return self


# fmt: off
class Generating(RequestBody):
    """Fields of every endpoint that generates."""

    model: ModelName = described(..., "Another name is a 404.",
        "the name of the served model (see /v1/models)")
    stream: bool = described(False,
        "Server-sent events, closed by `[DONE]`; of a response or message by its last event.")
    stop: Stops = described([], "Ends the text before the first match.",
        f"a string or a list of up to {limits.MAX_STOPS} strings, each of 1 to"
        f" {limits.MAX_STOP_LENGTH} characters")
    temperature: float = described(1.0,
        "Default 1; 0 takes the most likely token, and so does anything below 0.0001.", ge=0, le=2)
    top_p: float = described(1.0, "Default 1.", gt=0, le=1)
    seed: int | None = described(None,
        "Random by default; every reply reports its seed.",
        "an integer of 64 bits (-9223372036854775808 to 18446744073709551615)",
        ge=-(2**63), lt=2**64)
    presence_penalty: float = described(0.0, "Default 0.", ge=-2, le=2)
    frequency_penalty: float = described(0.0, "Default 0.", ge=-2, le=2)
    logit_bias: Biases = described({}, "Added to the logits.",
        f"an object of at most {limits.MAX_LOGIT_BIAS} entries, token id (below the vocabulary"
        " size) to a number from -100 to 100")
    top_k: int = described(0, "Extension. Default 0; 0 and -1 are off.",
        ge=-1, le=limits.MAX_LENGTH_FIELD)
    min_p: float = described(0.0, "Extension. Default 0, which is off.", ge=0, le=1)
    repetition_penalty: float = described(1.0,
        "Extension. Default 1, which is off; over prompt and generated tokens.", ge=0.01, le=10)
    min_tokens: int = described(0,
        "Extension. No stop token and no stop string before that many tokens, which must not be"
        " more than are asked for.", ge=0, le=limits.MAX_LENGTH_FIELD)
    ignore_eos: bool = described(False, "Extension. Generate through the end-of-text token.")
    stop_token_ids: StopTokens = described([], "Extension. Tokens that end the text.",
        f"a list of at most {limits.MAX_STOP_TOKEN_IDS} token ids below the vocabulary size")
    include_stop_str_in_output: bool = described(False,
        "Extension. Keep the stop string or stop token in the text.")
    skip_special_tokens: bool = described(True,
        "Extension. Default true: special tokens leave no text.")
    cache_salt: Label = described("",
        "Extension. Only requests of the same salt share cached prompt prefixes, and replies that"
        " `suffix` remembers; these also only with the same API key.")
    priority: int = described(0,
        "Extension. Default 0; lower is served earlier, and preempted later when the KV cache is"
        " full. Only for API keys that may set it.", neutral=(0,), unless=no_priority,
        ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)
    timeout: float | None = described(None,
        "Extension. Seconds that the request may take, waiting included; then it ends with an"
        " error (504).", ge=1, le=limits.MAX_SECONDS)
    request_id: str | None = described(None,
        "Extension. The reply's `id` ends with it. Without a header `X-Request-Id` it stands for"
        " one once the request is valid. New for each: ids of tool calls are made of it.",
        "a string of 1 to 128 letters, digits and ._:/+=@-", pattern=f"^{LABEL}$")
    return_token_ids: bool = described(False,
        "Extension. `token_ids` of each choice; `prompt_token_ids` in each choice (completions) or"
        " beside the choices (chat), in streams on the first chunk.")
    prediction: Prediction | None = described(None,
        "What the reply is expected to be, such as the file to be edited: draft tokens are taken"
        " from it, which affects only latency. An extension on completions.",
        'an object {"type": "content", "content": a string or a list of text parts, not empty}')
    speculation: SpeculationOptions | None = described(None,
        "Extension. Speculation for this request: the maximum draft tokens per step, and the"
        " proposers that may be used. The text does not change.",
        'an object {"enabled": true, "max_draft": "auto" or an integer from 1 to the server\'s K,'
        ' "proposers": a list of names from /v1/capabilities, each once}, or'
        ' {"max_draft": 0} or {"enabled": false} without the others')
    provenance: bool = described(False,
        "Extension. Each choice lists its tokens' texts with the source of each: a proposer, or"
        " `target` for tokens that no proposer drafted.")
    structured_outputs: StructuredOutputs | None = described(None,
        "Extension. The text matches this, and ends when it allows no further token.",
        'an object with exactly one of "json" (a schema), "regex", "choice" (a list of strings),'
        ' "grammar" (Lark, or EBNF as llama.cpp writes it) and "json_object" (true)')


class Labelled(Generating):
    """Fields of OpenAI's endpoints that have no effect here or are refused."""

    user: Label | None = described(None, "Not stored.", no_op=True)
    metadata: Metadata = described({}, "Not stored.",
        f"an object of at most {limits.MAX_METADATA} strings of at most {limits.MAX_LABEL_LENGTH}"
        f" characters, with names of at most {limits.MAX_METADATA_KEY}", no_op=True)
    service_tier: ServiceTier | None = described(None,
        'There is one tier, and replies to requests with this field say "default".', no_op=True)
    safety_identifier: Label | None = described(None, "Not stored.", no_op=True)
    prompt_cache_key: Label | None = described(None, "The prefix cache needs no hint.", no_op=True)
    moderation: Refused = refused("Moderation.")
    prompt_cache_options: Refused = refused("Cache control.")
    prompt_cache_retention: Refused = refused("Cache control.", "in_memory")


class CommonRequest(Labelled, ABC):
    """Fields of chat and completions."""

    LOGPROBS: ClassVar[str]  # the field that asks for alternatives

    max_tokens: int | None = None
    n: int = described(1,
        "Choices per prompt. Choice 0 uses the seed itself, choice i a fixed mix of seed and i.",
        ge=1, le=limits.MAX_N)
    stream_options: StreamOptions = described(StreamOptions(),
        "A last chunk with the usage and no choices. Extension: with `continuous_usage_stats` each"
        " chunk has the usage so far, of all choices together. Without either no chunk has usage."
        " Nothing is padded.",
        'an object with the fields "include_usage" and "continuous_usage_stats" (true or false)'
        ' and "include_obfuscation" (false), and only with `stream`')
    prompt_logprobs: int | None = described(None,
        "Extension. Log-probabilities of the prompt, with so many alternatives, in vLLM's shape: in"
        " each choice (completions) or beside the choices (chat).",
        ", and only without `stream`", ge=0, le=MAX_LOGPROBS)
    resume: Resume | None = described(None,
        "Extension. Continue an interrupted reply of this replica or another one: send the same"
        " request with the token ids received (`return_token_ids`) and the seed. The reply is the"
        " rest; `usage` counts the whole reply.",
        'an object {"token_ids": a list of ids, "seed": an integer, needed unless `temperature` is'
        ' 0 or `seed` is given, "system_fingerprint": that of the reply, to be refused where it'
        " cannot be continued exactly}, and only for one choice of one prompt, without `echo`,"
        " `prompt_logprobs` and `provenance`, without `stop` beside log-probabilities, and with"
        " `stream` beside `tools`")
    response_format: ResponseFormat | None = described(None,
        "The reply is JSON of this form, on one line. A schema is enforced, `strict` or not;"
        " one that cannot be enforced whole is a 400.",
        'an object with the field "type": "text", "json_object" or "json_schema", the last with'
        ' "json_schema": {"name", "schema", "description", "strict"}')
    guided_json: SchemaOrText | None = described(None,
        OLD_SPELLING.format("json"), "a JSON schema, as an object or as its text")
    guided_regex: Source | None = described(None, OLD_SPELLING.format("regex"))
    guided_choice: Choices | None = described(None,
        OLD_SPELLING.format("choice"), f"a list of 1 to {limits.MAX_CHOICES} strings")
    guided_grammar: Source | None = described(None, OLD_SPELLING.format("grammar"))
    truncate_prompt_tokens: Keep | None = described(None,
        "Extension. Keep only the last N tokens of each prompt, chat template included; -1:"
        " as many as fit the context beside the requested number of tokens, or beside one.",
        f"-1 or an integer from 1 to {limits.MAX_LENGTH_FIELD}, and only without `echo` and"
        " `suffix`")
    store: bool | None = described(None, "Nothing is ever stored.", no_op=True)
    guided_decoding_backend: Label | None = described(None, "There is one.", no_op=True)
    spaces_between_special_tokens: bool = described(True,
        "The tokenizer decides where spaces are.", no_op=True)
    functions: Refused = refused("The old form of `tools`; use `tools`.", [])
    function_call: Refused = refused("The old form of `tool_choice`; use `tool_choice`.", "none")
    audio: Refused = refused("Audio output.")
    modalities: Refused = refused("Other output than text.", ["text"])
    verbosity: Refused = refused("Verbosity control.", "medium")
    web_search_options: Refused = refused("Web search.")
    use_beam_search: Refused = refused("Beam search.", False)
    length_penalty: Refused = refused("Only for beam search.", 1.0, 1)
    bad_words: Refused = refused("Use `logit_bias`.", [])
    allowed_token_ids: Refused = refused("Use `structured_outputs`.")
    return_tokens_as_token_ids: Refused = refused("Use `return_token_ids`.", False)
    truncation_side: Refused = refused("The last tokens are kept.", "left")
    guided_whitespace_pattern: Refused = refused("JSON is written on one line.")
    # Routers in front add these to every request.
    no_stop_trim: Refused = refused("Use `include_stop_str_in_output`.", False)
    return_hidden_states: Refused = refused("Hidden states stay in the engine.", False)
    # fmt: on

    @property
    def biases(self) -> dict[int, float]:
        """Return `logit_bias` by token id."""
        return {int(key): bias for key, bias in self.logit_bias.items()}

    @property
    def length(self) -> int | None:
        """Return the limit on tokens to generate, or None."""
        return self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Return the number of alternatives per generated token; None: no logprobs."""

    @property
    def sets_length(self) -> bool:
        """Whether the client set a limit on tokens to generate."""
        return not {"max_tokens", "max_completion_tokens"}.isdisjoint(self.model_fields_set)

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt."""
        return False

    @property
    def fan_out(self) -> int:
        """Return the number of sequences generated per prompt."""
        return self.n

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences generated for all prompts."""
        return self.fan_out

    @property
    def given_seed(self) -> int | None:
        """Return the seed in the request, its own or that of `resume`."""
        return self.seed if self.resume is None or self.seed is not None else self.resume.seed

    @cached_property
    def constraint(self) -> Constraint | None:
        """Return the constraint on the text and the field that asks for it, or None."""
        return next(iter(self.constraints), None)

    @cached_property
    def constraints(self) -> list[Constraint]:
        """Return the constraint of each field that has one; more than one is refused."""
        shapes = (self.response_format, self.structured_outputs)
        constraints = [shape.constraint for shape in shapes if shape is not None]
        return [one for one in [*constraints, *guided(self)] if one is not None]

    @property
    def grammar(self) -> Grammar | None:
        return self.constraint.grammar if self.constraint is not None else None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options", "is only allowed with `stream`: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "is only allowed without `stream`: true")
        if len(self.constraints) > 1:
            first, second, *_ = self.constraints
            problem = f"and `{first.field}` both shape the text; leave one out"
            raise invalid(second.field, problem)
        if self.length is not None and self.min_tokens > self.length:
            raise wrong("min_tokens", f"at most `max_tokens` ({self.length})", self.min_tokens)
        if self.resume is not None:
            self._check_resume(self.resume)
        return self

    def _check_resume(self, resume: Resume) -> None:
        conflicts = {
            "echo": getattr(self, "echo", False),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "provenance": self.provenance,
            "stop": bool(self.stop) and self.alternatives is not None,
        }
        for name in [name for name, given in conflicts.items() if given]:
            beside = " beside log-probabilities" if name == "stop" else ""
            raise invalid("resume", f"is only allowed without `{name}`{beside}")
        if getattr(self, "tools", []) and not self.stream:
            raise invalid("resume", "is only allowed with `stream`: true beside `tools`")
        if self.num_sequences > 1:
            raise invalid("resume", "is only allowed for one choice of one prompt")
        if self.given_seed is None and self.temperature > 0:
            raise missing("resume.seed", "the seed of the reply that broke off")
        if resume.seed is not None and resume.seed != self.given_seed:
            raise invalid("resume.seed", f"is {resume.seed}, but `seed` is {self.seed}")
        if self.length is not None and len(resume.token_ids) > self.length:
            problem = f"has {len(resume.token_ids)} ids; at most {self.length} were asked for"
            raise invalid("resume.token_ids", problem)


# fmt: off
class ChatPrompt(RequestBody):
    """Fields of a chat that determine its prompt; /tokenize has them, too."""

    messages: Messages
    add_generation_prompt: bool | None = described(None,
        "Extension. Default true, with `continue_final_message` false: the prompt ends with the"
        " begin of the assistant's turn.",
        ", and not true with `continue_final_message`")
    continue_final_message: bool = described(False,
        "Extension. The reply continues the last message, which is the assistant's and has text;"
        " that text is not repeated.")
    chat_template_kwargs: TemplateVariables = {}
    chat_template: Refused = refused("Templates are programs; only the model's own is run.")
    reasoning_effort: Effort | None = described(None,
        'Handed to chat templates that read it. Where a template can only switch reasoning, "none"'
        ' is `enable_thinking`: false; where it cannot even that, "none" alone is allowed.',
        neutral=("none",), unless=no_effort)
    tools: Tools = described([],
        "Functions that the model may call; needs a chat template that knows tools. The arguments"
        " of `strict` tools are held to their schema by a grammar.",
        f'a list of at most {limits.MAX_TOOLS} objects with the type "function" and a function'
        " of name, description, parameters (a JSON schema) and strict; no name twice",
        neutral=([],), unless=no_tools)
    tool_choice: ToolChoiceBody | None = described(None,
        'Default "auto", or "none" without `tools`. "none": the tools are not shown to the model.'
        ' "required": calls and nothing else, by a grammar. A named function is called once.',
        '"none", "auto", "required", an object of the type "function" that names one, or one of the'
        ' type "allowed_tools"; all but "none" and "auto" only with `tools`',
        neutral=("none",))
    # fmt: on

    @property
    def generation_prompt(self) -> bool:
        """Whether the template begins the assistant's turn; by default unless one is continued."""
        given = self.add_generation_prompt
        return given if given is not None else not self.continue_final_message

    @property
    def choice(self) -> ToolChoice:
        return tool_choice(self.tool_choice)

    @property
    def describes_tools(self) -> bool:
        """Whether the prompt describes tools to the model."""
        return bool(self.tools) and self.choice.mode != "none"

    @cached_property
    def turns(self) -> list[dict[str, Any]]:
        """Return the messages as the chat template sees them."""
        return as_template_sees(self.messages)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        assert self.turns or not self.messages, "the messages fit together"
        if self.continue_final_message and self.messages:
            self._check_final()
        check_tools(self.tools, self.tool_choice)
        return self

    def _check_final(self) -> None:
        if self.add_generation_prompt:
            problem = "and `add_generation_prompt` must not both be true"
            raise invalid("continue_final_message", problem)
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.text.strip():
            problem = "must be a message of the assistant with some text and no tool calls:"
            problem += " the reply continues it"
            raise invalid(f"messages[{len(self.messages) - 1}]", problem)


class ChatRequest(CommonRequest, ChatPrompt):
    LOGPROBS = "top_logprobs"

    # fmt: off
    max_tokens: int | None = described(None,
        "Default: until the context is full. Prompt plus `max_tokens` must fit the context.",
        ge=1, le=limits.MAX_LENGTH_FIELD)
    max_completion_tokens: int | None = described(None,
        "The newer name of `max_tokens`; the two must not disagree.",
        ge=1, le=limits.MAX_LENGTH_FIELD)
    logprobs: bool = described(False,
        "Of the model itself: before penalties, bias, temperature and filters.")
    top_logprobs: int | None = described(None, "Alternatives per token.",
        ", and only with `logprobs`: true unless 0", neutral=(0,), ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = described(False, SPECIAL_TOKENS
        + " Default false: the chat template writes them.")
    echo: Refused = refused("Only for /v1/completions.", False)
    parallel_tool_calls: ParallelCalls = None
    include_reasoning: bool = described(True,
        "Extension. false: thinking is left out of the reply, but not out of its ids and usage.")
    separate_reasoning: bool = described(True,
        "Extension. false: thinking stays in the content, as the model wrote it.")
    stream_reasoning: bool = described(True, "Thinking is streamed as it comes.", no_op=True)
    # fmt: on

    @property
    def length(self) -> int | None:
        given = self.max_completion_tokens
        return given if given is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed with `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            problem = "and `max_completion_tokens` name one limit; leave one of them out"
            raise invalid("max_tokens", problem)
        return self


Prompt = str | list[int]
OnePrompt = Source | Annotated[list[TokenId], Field(min_length=1)]
ManyPrompts = Annotated[list[OnePrompt], Field(min_length=1, max_length=limits.MAX_PROMPTS)]


def is_ids(value: Any) -> bool:
    # One pass in C: a body may hold very many ids, and this blocks the event loop.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return one prompt or many as a tuple of prompts."""
    many = value if isinstance(value, list) and not (value and is_ids(value)) else [value]
    if not 1 <= len(many) <= limits.MAX_PROMPTS:
        raise ValueError
    for i, prompt in enumerate(many):
        if not (isinstance(prompt, str) or is_ids(prompt)):
            raise ValueError
        if not prompt:
            path = "prompt" if many is not value else f"prompt[{i}]"
            raise invalid(path, "is empty; a prompt needs at least one token")
    return tuple(many)


class CompletionRequest(CommonRequest):
    LOGPROBS = "logprobs"

    # fmt: off
    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(as_prompts, json_schema_input_type=OnePrompt | ManyPrompts),
    ] = described(..., "Each prompt gets `n` choices.",
        f"a string, a list of token ids, or a list of up to {limits.MAX_PROMPTS} strings or lists"
        " of token ids; none of them empty")
    max_tokens: int | None = described(16,
        "Default 16. Prompt plus `max_tokens` must fit the context. 0 scores the prompt, with"
        " `echo` and `logprobs`.", ge=0, le=limits.MAX_LENGTH_FIELD)
    best_of: int | None = described(None,
        "Candidates generated per prompt; the `n` with the highest log-probability per token are"
        " returned, best first. All of them count as completion tokens.",
        f"an integer from `n` to {limits.MAX_N}, and equal to `n` with `stream`",
        ge=1, le=limits.MAX_N)
    suffix: str = described("",
        "What follows the text to generate (fill-in-the-middle), where the vocabulary has tokens"
        " for it, which end the text, but for `ignore_eos`. Other special tokens that prompt and"
        " suffix spell out are plain text.",
        ", and only without `echo`", neutral=("",), unless=no_fill_in)
    echo: bool = described(False,
        "The text (and its logprobs, when asked for) begins with the prompt.")
    logprobs: int | None = described(None,
        "Of the model itself: before penalties, bias, temperature and filters.",
        ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = described(True, SPECIAL_TOKENS + " Default true.")
    tools: Refused = refused("Tools are for chat.", [])
    tool_choice: Refused = refused("Tools are for chat.", "none")
    parallel_tool_calls: Refused = refused("Tools are for chat.")
    # fmt: on

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def fan_out(self) -> int:
        return self.best_of or self.n

    @property
    def num_sequences(self) -> int:
        return len(self.prompt) * self.fan_out

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fan_out < self.n:
            raise wrong("best_of", f"at least `n` ({self.n})", self.best_of)
        if self.fan_out > self.n and self.stream:
            problem = f"must be left out or equal to `n` ({self.n}) with `stream`: true, since"
            raise invalid("best_of", f"{problem} candidates are compared when they are complete")
        if self.suffix and self.echo:
            raise invalid("echo", "is only allowed without `suffix`")
        for name in ("echo", "suffix"):
            if getattr(self, name) and self.truncate_prompt_tokens is not None:
                raise invalid("truncate_prompt_tokens", f"is only allowed without `{name}`")
        return self
