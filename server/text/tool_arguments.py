"""Arguments of a call: as a JSON object, or each in a tag of its own (Qwen3-Coder), where a string
stands as it is and anything else as JSON. What a grammar says of either form, and how the latter is
read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from server.errors import GrammarRefused
from server.text.markers import ANY, in_regex

Schema = Mapping[str, Any]
CLOSE = "</parameter>"
DEFINITIONS = ("$defs", "definitions")
# What tags can be held to, of an object and of a string.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema"}
OF_OBJECT = {"type", "properties", "required", "additionalProperties", *DEFINITIONS, *ANNOTATIONS}
OF_STRING = {"type", "enum", "const", *ANNOTATIONS}
OF_OPTIONAL = {"type", "anyOf", *ANNOTATIONS}
WORDS = {"True": "true", "False": "false", "None": "null"}  # that templates write for constants
MAX_REFERENCES = 8
TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


def json_rules(rule: str, schema: Schema) -> list[str]:
    return [f"{rule}: %json {json.dumps(schema)}"]


def tag_rules(rule: str, schema: Schema) -> list[str]:
    """In the order of the schema's properties. Raises GrammarRefused for what tags cannot be held
    to."""
    _refuse_beyond(OF_OBJECT, schema, "the parameters")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _refused("`properties` must be an object, and `required` a list")
    if not (properties or required) and schema.get("additionalProperties", True) is not False:
        tag = f"/<parameter=[^<>\\n]+>\\n{ANY}\\n{in_regex(CLOSE)}\\n/"
        return [f"{rule}: {rule}_any*", f"{rule}_any[lazy]: {tag}"]
    rules, parts = list[str](), list[str]()
    for i, name in enumerate(dict.fromkeys([*properties, *map(str, required)])):
        if any(char in name for char in "<>\n"):
            raise _refused("the name of a parameter has <, > or a line end in it")
        part = f"{rule}_{i}"
        value, more = _value_rules(part, name, properties.get(name, {}), schema)
        rules += [f"{part}: {json.dumps(f'<parameter={name}>{chr(10)}')} {value}", *more]
        parts.append(part if name in required else f"{part}?")
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def _value_rules(rule: str, name: str, schema: Any, root: Schema) -> tuple[str, list[str]]:
    """What stands for a value and its closing tag, and the rules that this needs."""
    end, inner = json.dumps(f"\n{CLOSE}\n"), resolved(schema, root)
    types = types_of(inner)
    if types and "string" not in types:
        shared = {key: root[key] for key in DEFINITIONS if key in root}
        return f"{rule}_json {end}", [f"{rule}_json: %json {json.dumps({**shared, **inner})}"]
    if types == {"string"}:
        _refuse_beyond(OF_STRING, inner, f"`{name}`")
        values = [inner["const"]] if "const" in inner else inner.get("enum", [])
        if any(not isinstance(value, str) or CLOSE in value for value in values):
            raise _refused(f"a value of `{name}` is no string, or has {CLOSE} in it")
        if values:
            return f"({' | '.join(map(json.dumps, values))}) {end}", []
    elif types:  # told by its value alone, so only what every value satisfies
        _refuse_beyond(OF_OPTIONAL, inner, f"`{name}`")
        for branch in (inner, *inner.get("anyOf", ())):
            _refuse_beyond(OF_OPTIONAL, branch, f"`{name}`")
    else:
        _refuse_beyond(ANNOTATIONS, inner, f"`{name}`")
    return f"{rule}_text", [f"{rule}_text[lazy]: /{ANY}\\n{in_regex(CLOSE)}\\n/"]


def _refused(said: str) -> GrammarRefused:
    return GrammarRefused(f"`tools` cannot be honoured: {said}", param="tools")


def _refuse_beyond(known: Collection[str], schema: Schema, what: str) -> None:
    for keyword in schema:
        if keyword not in known:
            said = f"`{keyword[:64]}` of {what} cannot be enforced in this model's form of calls"
            raise _refused(said)


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that is meant, of a reference to one within `root`; empty for what is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(path := schema.get("$ref"), str) or not path.startswith("#/"):
            return schema
        target: Any = root
        for step in path[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return {}


def types_of(schema: Schema) -> frozenset[str]:
    """Those that a value may have; empty: nothing is said."""
    if said := schema.get("type"):
        return frozenset(map(str, said if isinstance(said, list) else [said]))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(TYPES[type(value)] for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            each = [
                types_of(part) if isinstance(part, Mapping) else frozenset() for part in branches
            ]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def value_of(text: str, types: Collection[str]) -> str:
    """The JSON of what stands between tags: of the types that are allowed, and a string if it is
    nothing else."""
    spoken = WORDS.get(text.strip(), text)
    try:
        found = TYPES[type(json.loads(spoken, parse_constant=int))]  # which refuses NaN
    except (ValueError, RecursionError):
        found = "string"
    alike = {"integer", "number"} if found == "integer" else {found}
    if found == "string" or ("string" in types and not alike & set(types)):
        return json.dumps(text, ensure_ascii=False)
    return spoken.strip()
