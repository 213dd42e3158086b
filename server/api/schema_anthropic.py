"""Request bodies of /v1/messages and its count_tokens, and the chat requests made from them."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from server.api.constraints import Schema
from server.api.errors import invalid
from server.api.fields import Refused, described, no_chat_template, no_tools, refused
from server.api.limits import MAX_LENGTH_FIELD, MAX_MESSAGES, MAX_STOP_LENGTH, MAX_STOPS, MAX_TOOLS
from server.api.messages import Description, FunctionName, as_parameters
from server.api.request import AnyObject, Label, RequestObject, Unsupported
from server.api.rewritten import Rewritten
from server.api.schema import ChatRequest, ManyStops, OptionalModel, TemplateVariables

NAMES = (  # chat's field names, and this API's
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"response_format(\.json_schema)?"), "output_config.format"),
    (re.compile("reasoning_effort"), "output_config.effort"),
    (re.compile("parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"stop(?=\[|$)"), "stop_sequences"),
)
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # context_management


class Cacheable(RequestObject):
    """Every prompt is cached, so `cache_control` has no effect."""

    cache_control: AnyObject | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: Unsupported = None


class ThinkingBlock(RequestObject):
    """Thinking, for chat templates that read it. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Annotated[Label, Field(min_length=1)]
    name: FunctionName
    input: AnyObject
    caller: AnyObject | None = None
    toolset_name: Unsupported = None


Texts = str | list[TextBlock]


class ToolResultBlock(Cacheable):
    """A tool's result. The model does not see `is_error`, so the text must report an error."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: Texts = ""
    is_error: bool = False
    toolset_name: Unsupported = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(RequestObject):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


Turns = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class CustomTool(Cacheable):
    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Description | None = None
    input_schema: Annotated[AnyObject, AfterValidator(as_parameters)]
    strict: bool = False
    eager_input_streaming: bool | None = None  # it always is
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] = False


class Choice(RequestObject):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(RequestObject):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool = False


class JsonFormat(RequestObject):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(RequestObject):
    effort: str | None = None
    format: JsonFormat | None = None


class Thinking(RequestObject):
    """If adaptive, the model thinks as much as it likes, or not at all if it cannot reason."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        return self.type == "adaptive" and self.display != "omitted"


class MessagesMetadata(RequestObject):
    user_id: Label | None = None


class BoundedChat(ChatRequest):
    """A chat request whose required length is only a bound, which need not fit the context."""

    @property
    def sets_length(self) -> bool:
        return False


# fmt: off
class MessagesRequest(Rewritten):
    CHAT, NAMES, CALL_ID, CONVERSATION, LEAD = (
        BoundedChat, NAMES, "tool_use_id", "messages", "system"
    )

    max_tokens: int | None = described(...,
        "The reply also ends where the context is full (`model_context_window_exceeded`).",
        ge=1, le=MAX_LENGTH_FIELD)
    messages: Turns = described(...,
        "Roles user, assistant and system; content a string or a list of blocks: text, of the"
        " assistant thinking and tool_use, of the user tool_result (text) before the text. Turns"
        " of one role in a row are one. The reply goes on with a last turn of the assistant."
        " `cache_control` changes nothing, and `is_error` is not passed to the model.",
        f"a list of 1 to {MAX_MESSAGES} messages", unless=no_chat_template)
    system: Texts = described("",
        "A system message before the others. Blocks are joined by line breaks.",
        "a string or a list of text blocks")
    stop_sequences: ManyStops = described([], "Ends the text before the first match.",
        f"a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_LENGTH} characters")
    temperature: float = described(1.0,
        "Default 1; 0 takes the most likely token, and so does anything below 0.0001.", ge=0, le=1)
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = described([],
        "As for chat. There are no hosted tools.",
        f'a list of at most {MAX_TOOLS} objects with the type "custom" or none, name, description,'
        " input_schema and strict", neutral=([],), unless=no_tools)
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None = described(
        None, "As for chat: `any` is its \"required\", `tool` a named function.",
        'an object of the type "auto", "any", "none" or "tool" (with "name"), and'
        ' "disable_parallel_tool_use"; all but "none" and "auto" only with `tools`',
        neutral=({"type": "none"},))
    output_config: OutputConfig = described(OutputConfig(),
        "`format` does what a schema in `response_format` does for chat, `effort` what"
        " `reasoning_effort` does there.",
        'an object with "format" ({"type": "json_schema", "schema": ...}) and "effort"',
        neutral=({},))
    thinking: Thinking | None = described(None,
        "Thinking is returned in separate, complete blocks and has no budget. \"disabled\" omits it"
        " and is `reasoning_effort`: \"none\" for the template, unless `effort` is given.",
        'an object of the type "disabled" or "adaptive", the latter with "display": "summarized" or'
        ' "omitted"')
    chat_template_kwargs: TemplateVariables = {}
    metadata: MessagesMetadata = described(MessagesMetadata(), "Not stored.",
        'an object with the field "user_id", a string of at most 512 characters', no_op=True)
    service_tier: Literal["auto", "standard_only"] | None = described(None, "There is one tier.",
        no_op=True)
    cache_control: AnyObject | None = described(None, "Prompts are always cached.",
        "an object", no_op=True)
    stop: Refused = refused("Here it is `stop_sequences`.", [])  # type: ignore[assignment]
    resume: Refused = refused("Messages do not report their token ids. Resume chat completions"
        " instead.")
    container: Refused = refused("There are none.")
    context_management: Refused = refused("Nothing is compacted.", {}, {"edits": []}, KEEP_ALL)
    diagnostics: Refused = refused("There are none.", {"previous_message_id": None})
    inference_geo: Refused = refused("The request is served where it is sent to.")
    mcp_servers: Refused = refused("There are no hosted tools.", [])
    speed: Refused = refused("There is one speed.", "standard")
    user_profile_id: Refused = refused("There are none.")
    # fmt: on

    @property
    def as_chat(self) -> dict[str, Any]:
        config, choice, thinking = self.output_config, self.tool_choice, self.thinking
        unless = "none" if thinking is not None and thinking.type == "disabled" else None
        single = choice is not None and choice.disable_parallel_tool_use and bool(self.tools)
        fields: dict[str, Any] = {
            "stop": self.stop_sequences or None,
            "reasoning_effort": config.effort or unless,
            "include_reasoning": thinking is None or thinking.is_shown,
            "tools": [_as_tool(tool) for tool in self.tools],
            "parallel_tool_calls": False if single else None,
            "tool_choice": None,
            "service_tier": None,
        }
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        match choice:
            case NamedChoice():
                function = {"name": choice.name}
                fields["tool_choice"] = {"type": "function", "function": function}
            case Choice():
                fields["tool_choice"] = "required" if choice.type == "any" else choice.type
        return {**fields, "continue_final_message": self.messages[-1].role == "assistant"}

    @cached_property
    def as_messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        messages, places = list[dict[str, Any]](), list[str]()
        if self.system:
            messages.append({"role": "system", "content": _parts(self.system)})
            places.append("system")
        for i, turn in enumerate(self.messages):
            own = len(messages)  # index of this turn's first message
            for j, block in enumerate(turn.blocks):
                role, fields = _as_message(turn, block, where := f"messages[{i}].content[{j}]")
                same = messages and messages[-1]["role"] == role != "tool"
                if role == "tool" and any(one["role"] != role for one in messages[own:]):
                    raise invalid(where, ": results of tools stand before the text")
                if not same:
                    messages.append({"role": role})
                    places.append(where if role == "tool" else f"messages[{i}]")
                for name, value in fields.items():
                    known = messages[-1].get(name)
                    messages[-1][name] = value if known is None else known + value
        last = messages[-1]
        if last["role"] == "assistant" and "tool_calls" in last:
            text = ": a turn of the assistant with calls needs a turn with their results behind it"
            raise invalid(f"messages[{len(self.messages) - 1}]", text)
        return messages, places


class CountTokensRequest(MessagesRequest):
    model: OptionalModel = ""
    max_tokens: int | None = described(
        None, "Changes nothing.", no_op=True, ge=1, le=MAX_LENGTH_FIELD
    )


def _parts(texts: Texts) -> list[dict[str, str]]:
    blocks = [texts] if isinstance(texts, str) else [block.text for block in texts]
    return [{"type": "text", "text": text} for text in blocks or ("",)]


def _as_message(turn: Turn, block: Block, where: str) -> tuple[str, dict[str, Any]]:
    """Return the role of the chat message, and the fields that this block adds to it."""
    match block:
        case TextBlock():
            return turn.role, {"content": _parts([block])}
        case ThinkingBlock() if turn.role == "assistant":
            return "assistant", {"reasoning_content": block.thinking}
        case ToolUseBlock() if turn.role == "assistant":
            text = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": text}
            call = {"id": block.id, "type": "function", "function": function}
            return "assistant", {"tool_calls": [call]}
        case ToolResultBlock() if turn.role == "user":
            return "tool", {"tool_call_id": block.tool_use_id, "content": _parts(block.content)}
    raise invalid(f"{where}.type", f": a turn of the role {turn.role} has no {block.type}")


def _as_tool(tool: CustomTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
