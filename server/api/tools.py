"""The fields about tools: which functions are offered, and which of them may be called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from server.api.body import AnyObject, Part, Text
from server.api.errors import ApiError, invalid, missing, only
from server.api.explain import must_be, wrong
from server.api.limits import MAX_DESCRIPTION, MAX_TOOL_BYTES, MAX_TOOLS

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
NAME_RULE = "1 to 64 of the characters A-Z, a-z, 0-9, _ and -"
FunctionName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
Description = Annotated[Text, Field(max_length=MAX_DESCRIPTION)]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class FunctionBody(Part):
    name: FunctionName
    description: Description | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class ToolBody(Part):
    type: Literal["function"]
    function: FunctionBody


class FunctionNameBody(Part):
    name: FunctionName


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionNameBody


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolsBody = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]
ToolChoiceBody = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer. `strict`: its arguments are held to `parameters`, a JSON schema."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it, in the key order of transformers' own."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: only these may be called (`path` says where they stand); None: all on offer.
    `single`: one named function, called once."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    path: str = "tool_choice"
    single: bool = False


def as_tools(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise must_be("tools", value, "chat")
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(value))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            path = f"tools[{i}].function.name"
            raise invalid(path, f"`{path}`: another tool has the name {tool.name} already")
        seen.add(tool.name)
    return tools


def _tool(item: Any, path: str) -> Tool:
    given = checked(item, path, {"type", "function"}, kind="function")
    where = f"{path}.function"
    if "function" not in given:
        raise missing(where, "an object with the name of the function")
    function = checked(
        given["function"], where, {"name", "description", "parameters", "strict"}, kind=None
    )
    name = function_name(function, where)
    description = function.get("description")
    if not isinstance(description, str | None) or len(description or "") > MAX_DESCRIPTION:
        raise _must(f"{where}.description", f"a string of at most {MAX_DESCRIPTION} characters")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _must(f"{where}.parameters", "a JSON schema of an object")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise _must(f"{where}.parameters.type", '"object"')
    _check_json(parameters, f"{where}.parameters")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise _must(f"{where}.strict", "true or false")
    return Tool(name, description, parameters, strict)


def _check_json(value: Any, path: str) -> None:
    try:
        size = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise _must(path, "JSON, which has no NaN and no Infinity") from None
    if size > MAX_TOOL_BYTES:
        raise _must(path, f"at most {MAX_TOOL_BYTES} bytes of JSON")


def as_tool_choice(value: Any) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function"}:
            given = checked(value, "tool_choice", {"type", "function"}, kind="function")
            path = "tool_choice.function"
            if "function" not in given:
                raise missing(path, "an object with the name of the function")
            named = checked(given["function"], path, {"name"}, kind=None)
            name = function_name(named, path)
            return ToolChoice("required", (name,), f"{path}.name", single=True)
        case {"type": "allowed_tools"}:
            return _allowed_tools(value)
        case {"type": str()}:
            allowed = '"function" or "allowed_tools"'
            raise _must("tool_choice.type", allowed, code="unsupported_field")
    raise must_be("tool_choice", value, "chat")


def _allowed_tools(value: dict[str, Any]) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    given = checked(value, "tool_choice", {"type", "allowed_tools"}, kind="allowed_tools")
    if "allowed_tools" not in given:
        raise missing(path, "an object with mode and tools")
    allowed = checked(given["allowed_tools"], path, {"mode", "tools"}, kind=None)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise _must(f"{path}.mode", '"auto" or "required"')
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise _must(f"{path}.tools", f"a list of 1 to {MAX_TOOLS} tools")
    names = []
    for i, item in enumerate(tools):
        where = f"{path}.tools[{i}]"
        tool = checked(item, where, {"type", "function"}, kind="function")
        function = checked(tool.get("function", {}), f"{where}.function", {"name"}, kind=None)
        names.append(function_name(function, f"{where}.function"))
    return ToolChoice("auto" if mode == "auto" else "required", tuple(names), f"{path}.tools")


def check_tools(tools: tuple[Tool, ...], choice: ToolChoice | None, parallel: bool | None) -> None:
    """The fields against each other. Raises ApiError."""
    if not tools:
        if choice is not None and choice.mode != "none":
            raise invalid("tool_choice", "`tool_choice` is only allowed with `tools`")
        if parallel is not None:
            raise invalid(
                "parallel_tool_calls", "`parallel_tool_calls` is only allowed with `tools`"
            )
    offered = {tool.name for tool in tools}
    for name in (choice.names or ()) if choice is not None else ():
        if choice is not None and name not in offered:
            raise invalid(choice.path, f"`{choice.path}`: no tool of the name {name} is in `tools`")


def checked(value: Any, path: str, names: set[str], *, kind: str | None) -> dict[str, Any]:
    """An object with no other fields than `names`, nulls left out; `kind`: what `type` must be."""
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    given = {name: item for name, item in value.items() if item is not None}
    if kind is not None and given.get("type") != kind:
        code = "unsupported_field" if isinstance(given.get("type"), str) else "invalid_value"
        raise _must(f"{path}.type", f'"{kind}"', code=code)
    only(given, names, path)
    return given


def function_name(function: dict[str, Any], path: str) -> str:
    name = function.get("name")
    if name is None:
        raise missing(f"{path}.name", NAME_RULE)
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise _must(f"{path}.name", NAME_RULE)
    return name


def _must(path: str, allowed: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"`{path}` must be {allowed}", param=path, code=code)
