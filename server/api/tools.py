"""The fields about tools: which functions are offered, and which of them may be called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from server.api.errors import invalid
from server.api.limits import MAX_DESCRIPTION, MAX_TOOL_BYTES, MAX_TOOLS
from server.api.request import AnyObject, Part, Text, fault


def _parameters(value: AnyObject) -> AnyObject:
    if value.get("type", "object") != "object":
        raise fault("type", '`{path}` must be "object"')
    try:
        size = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise fault("", "`{path}` must be JSON, which has no NaN and no Infinity") from None
    if size > MAX_TOOL_BYTES:
        raise fault("", f"`{{path}}` must be at most {MAX_TOOL_BYTES} bytes of JSON")
    return value


FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Description = Annotated[Text, Field(max_length=MAX_DESCRIPTION)]
NO_PARAMETERS: AnyObject = {"type": "object", "properties": {}}


class ToolFunction(Part):
    """`strict`: arguments are held to `parameters`, a JSON schema."""

    name: FunctionName
    description: Description | None = None
    parameters: Annotated[AnyObject, AfterValidator(_parameters)] | None = None
    strict: bool = False


class Tool(Part):
    type: Literal["function"]
    function: ToolFunction

    def as_template_sees(self) -> dict[str, Any]:
        """In the key order of transformers' own."""
        given = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        parameters = self.function.parameters
        function = {**given, "parameters": NO_PARAMETERS if parameters is None else parameters}
        return {"type": "function", "function": function}


class FunctionReference(Part):
    name: FunctionName


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionReference


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoiceBody = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: only these may be called (`path` says where they stand); None: all on offer.
    `single`: one named function, called once."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    path: str = "tool_choice"
    single: bool = False


def tool_choice(given: ToolChoiceBody | None) -> ToolChoice:
    match given:
        case NamedTool():
            name = given.function.name
            return ToolChoice("required", (name,), "tool_choice.function.name", single=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(allowed.mode, names, "tool_choice.allowed_tools.tools")
        case _:
            return ToolChoice(given or "auto")


def check_tools(tools: list[Tool], given: ToolChoiceBody | None, parallel: bool | None) -> None:
    """The fields against each other. Raises ApiError."""
    choice = tool_choice(given)
    if not tools and given is not None and choice.mode != "none":
        raise invalid("tool_choice", "`tool_choice` is only allowed with `tools`")
    if not tools and parallel is not None:
        raise invalid("parallel_tool_calls", "`parallel_tool_calls` is only allowed with `tools`")
    offered: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in offered:
            path = f"tools[{i}].function.name"
            raise invalid(path, f"`{path}`: another tool has the name {tool.function.name} already")
        offered.add(tool.function.name)
    for name in choice.names or ():
        if name not in offered:
            raise invalid(choice.path, f"`{choice.path}`: no tool of the name {name} is in `tools`")
