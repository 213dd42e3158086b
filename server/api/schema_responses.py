"""Request body of /v1/responses, and the chat request made from it."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.constraints import FreeFormat, JsonSchema
from server.api.errors import invalid
from server.api.fields import Refused, described, no_chat_template, no_effort, no_tools, refused
from server.api.limits import MAX_LENGTH_FIELD, MAX_MESSAGES, MAX_TOOLS
from server.api.messages import FunctionName, ToolFunction
from server.api.request import AnyObject, Label, RequestObject, Unsupported
from server.api.rewritten import Rewritten
from server.api.schema import Labelled, OptionalModel, ParallelCalls, TemplateVariables

LOGPROBS = "message.output_text.logprobs"  # for `include`
NOT_STORED = "No response is stored: send the whole conversation as `input`."
NAMES = (  # chat's field names, and this API's
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"tool_choice\.(function|allowed_tools)"), "tool_choice"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile("max_(completion_)?tokens"), "max_output_tokens"),
    (re.compile("reasoning_effort"), "reasoning.effort"),
    (re.compile("messages"), "input"),
)


class InputText(RequestObject):
    type: Literal["input_text"]
    text: str
    annotations: Unsupported = None


class OutputText(RequestObject):
    type: Literal["output_text"]
    text: str
    logprobs: list[AnyObject] = []
    annotations: Unsupported = None


InputPart = Annotated[InputText | OutputText, Field(discriminator="type")]


class Item(RequestObject):
    """An item of the input. Ids and statuses are not stored."""

    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


Content = str | Annotated[list[InputPart], Field(min_length=1, fail_fast=True)]


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class InputCall(Item):
    type: Literal["function_call"]
    call_id: Annotated[Label, Field(min_length=1)]
    name: FunctionName
    arguments: str


class InputCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: Content


class ReasoningText(RequestObject):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Item):
    """Reasoning as a Response returned it. It joins the assistant's message that follows it."""

    type: Literal["reasoning"]
    summary: Annotated[list[AnyObject], Field(max_length=0)] = []  # Responses have none
    content: list[ReasoningText] = []
    encrypted_content: Unsupported = None


def _typed(item: Any) -> Any:
    """Add the type to a message, which may leave it out."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


InputItem = Annotated[
    InputMessage | InputCall | InputCallOutput | InputReasoning,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(RequestObject):
    format: Annotated[FreeFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestObject):
    """Reasoning options. Those for summaries and modes are refused rather than ignored."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None
    context: None = None
    mode: None = None


class FlatTool(ToolFunction):
    type: Literal["function"]


class FlatNamedTool(RequestObject):
    type: Literal["function"]
    name: FunctionName


class FlatAllowedTools(RequestObject):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ResponsesStreamOptions(RequestObject):
    include_obfuscation: Literal[False] = False


# fmt: off
class ResponsesRequest(Rewritten, Labelled):
    NAMES, CALL_ID, CONVERSATION, LEAD = NAMES, "call_id", "input", "instructions"

    input: (
        str
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    ) = described(...,
        "Items: messages (roles user, system, developer, assistant; content a string or a list"
        " of input_text and output_text parts), function_call, function_call_output and reasoning,"
        " which is not passed to the model again. Ids and statuses of items are not stored.",
        f"a string or a list of 1 to {MAX_MESSAGES} items", unless=no_chat_template)
    instructions: str | None = described(None, "A system message before the input.")
    max_output_tokens: int | None = described(None,
        "Until the context is full by default. Input plus output must fit the context.",
        ge=1, le=MAX_LENGTH_FIELD)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = (
        described([],
            "Log-probabilities of the text. Reasoning items are plain text, nothing is encrypted.",
            f'a list of "{LOGPROBS}" and "reasoning.encrypted_content"')
    )
    top_logprobs: int | None = described(None, "Alternatives per token.",
        f', and only with `include`: ["{LOGPROBS}"] unless 0', neutral=(0,), ge=0, le=MAX_LOGPROBS)
    text: TextConfig = described(TextConfig(),
        "`format` does what `response_format` does for chat, `verbosity` what it does there.",
        'an object with "format" (an object of the type text, json_object or json_schema) and'
        ' "verbosity"')
    reasoning: Reasoning = described(Reasoning(),
        "`effort` does what `reasoning_effort` does for chat. Each of `summary`,"
        " `generate_summary`, `context`, `mode` must be left out or null: reasoning is returned"
        " unchanged.",
        'an object with "effort"', neutral=({},), unless=no_effort)
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = described([],
        "As for chat. There are no hosted tools.",
        f'a list of at most {MAX_TOOLS} objects with the type "function", name, description,'
        " parameters and strict", neutral=([],), unless=no_tools)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FlatNamedTool | FlatAllowedTools, Field(discriminator="type")]
        | None
    ) = described(None, "As for chat.",
        '"none", "auto", "required", {"type": "function", "name": ...} or {"type":'
        ' "allowed_tools", "mode": ..., "tools": [...]}', neutral=("none",))
    chat_template_kwargs: TemplateVariables = {}
    parallel_tool_calls: ParallelCalls = None
    stream_options: ResponsesStreamOptions | None = described(None, "Nothing is padded.",
        'an object with the field "include_obfuscation" (false), and only with `stream`')
    truncation: Literal["disabled"] = described("disabled",
        "Input that does not fit is a 400, never cut.")
    store: Refused = refused("Nothing is ever stored.", False)
    previous_response_id: Refused = refused(NOT_STORED)
    conversation: Refused = refused(NOT_STORED)
    background: Refused = refused("There is no background mode.", False)
    prompt: Refused = refused("There are no stored prompt templates.")
    max_tool_calls: Refused = refused("There are no hosted tools.")
    context_management: Refused = refused("Nothing is compacted.", [])
    access_programs: Refused = refused("There are none.")
    image: Refused = refused("Text only.")
    resume: Refused = refused("A resumed response could not repeat its event numbers and its full"
        " output. Resume chat completions instead.")
    # fmt: on

    @cached_property
    def as_messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        """As in `Rewritten`. Consecutive calls and the assistant's text before them are merged."""
        messages, places = list[dict[str, Any]](), list[str]()
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
            places.append("instructions")
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}], [*places, "input"]
        for i, item in enumerate(self.input):
            match item:
                case InputMessage():
                    message = {"role": item.role, "content": _content(item.content)}
                    last = messages[-1].keys() if messages else ()
                    if item.role == "assistant" and last == {"role", "reasoning_content"}:
                        messages[-1] |= message
                        continue
                    messages.append(message)
                case InputCall():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                        places.append(f"input[{i}]")
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    calls = messages[-1].setdefault("tool_calls", [])
                    if any(other["id"] == item.call_id for other in calls):
                        problem = ": another call has this id already"
                        raise invalid(f"input[{i}].call_id", problem)
                    calls.append(call)
                    continue
                case InputReasoning():
                    thought = "\n".join(part.text for part in item.content)
                    if not thought:
                        continue
                    messages.append({"role": "assistant", "reasoning_content": thought})
                case InputCallOutput():
                    output = {"tool_call_id": item.call_id, "content": _content(item.output)}
                    messages.append({"role": "tool", **output})
            places.append(f"input[{i}]")
        return messages, places

    @property
    def as_chat(self) -> dict[str, Any]:
        own = self.sent
        text, reasoning = own.get("text", {}), own.get("reasoning", {})
        fields = {
            "max_completion_tokens": own.get("max_output_tokens"),
            "reasoning_effort": reasoning.get("effort"),
            "response_format": text.get("format"),
            "tools": [_nested(tool, "function") for tool in own.get("tools", ())] or None,
            "tool_choice": own.get("tool_choice"),
        }
        if LOGPROBS in own.get("include", ()):
            fields |= {"logprobs": True, "top_logprobs": own.get("top_logprobs") or 0}
        match fields["response_format"]:
            case {"type": "json_schema"} as schema:
                fields["response_format"] = _nested(schema, "json_schema")
        match fields["tool_choice"]:
            case {"type": "function"} as named:
                fields["tool_choice"] = _nested(named, "function")
            case {"type": "allowed_tools", "tools": tools} as allowed:
                inner = [_nested(tool, "function") for tool in tools]
                fields["tool_choice"] = _nested({**allowed, "tools": inner}, "allowed_tools")
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise invalid("top_logprobs", f'is only allowed with `include`: ["{LOGPROBS}"]')
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed with `stream`: true")
        return self


class InputTokensRequest(ResponsesRequest):
    model: OptionalModel = ""


def _content(content: str | list[InputPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _nested(flat: dict[str, Any], name: str) -> dict[str, Any]:
    """Turn {"type": t, ...} into {"type": t, `name`: {...}}."""
    inner = {key: value for key, value in flat.items() if key != "type"}
    return {"type": flat["type"], name: inner}
