"""response_format and structured_outputs: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from engine.messages import Grammar
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_grammar_bytes=20_000) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as http:
        yield http


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}
    return http.post("/v1/chat/completions", content=json.dumps(body))


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


LARK = 'start: "yes" | "no" /[0-9]+/'
REACHES: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": named(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    (
        {"response_format": named(SCHEMA, strict=True, description="d")},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    (
        {"response_format": named({"const": "é\t"}, strict=None)},
        Grammar("json_schema", '{"const": "é\\t"}'),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
    ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar("choice", '["é", "b"]')),
    ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    (
        {"structured_outputs": {"regex": "x", "disable_any_whitespace": False}},
        Grammar("regex", "x"),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), REACHES)
def test_what_reaches_the_engine(
    served: Served, http: httpx.Client, fields: dict[str, Any], grammar: Grammar
) -> None:
    """The schema keeps the client's order of properties, which is the order of the reply."""
    reply = post(http, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["refusal"] is None
    assert served.client.submitted[-1].params.grammar == grammar


def test_text_is_left_alone(served: Served, http: httpx.Client) -> None:
    assert post(http, response_format={"type": "text"}).status_code == 200
    assert served.client.submitted[-1].params.grammar is None


RF, SO = "response_format", "structured_outputs"
SCHEMA_PATH = f"{RF}.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({RF: "json_object"}, RF),
    ({RF: {}}, f"{RF}.type"),
    ({RF: {"type": "xml"}}, f"{RF}.type"),
    ({RF: {"type": "grammar", "grammar": "x"}}, f"{RF}.type"),
    ({RF: {"type": "json_object", "schema": {}}}, f"{RF}.schema"),
    ({RF: {"type": "text", "json_schema": {}}}, f"{RF}.json_schema"),
    ({RF: {"type": "json_schema"}}, f"{RF}.json_schema"),
    ({RF: named(SCHEMA, name="")}, f"{RF}.json_schema.name"),
    ({RF: named(SCHEMA, name="a b")}, f"{RF}.json_schema.name"),
    ({RF: named(SCHEMA, name="x" * 65)}, f"{RF}.json_schema.name"),
    ({RF: named(SCHEMA, strict="yes")}, f"{RF}.json_schema.strict"),
    ({RF: named(SCHEMA, description=5)}, f"{RF}.json_schema.description"),
    ({RF: named(SCHEMA, mood="good")}, f"{RF}.json_schema.mood"),
    ({RF: named(None)}, SCHEMA_PATH),
    ({RF: named(True)}, SCHEMA_PATH),
    ({RF: named([])}, SCHEMA_PATH),
    ({RF: named({"const": float("nan")})}, SCHEMA_PATH),
    ({RF: named({"type": "strin"})}, SCHEMA_PATH),
    ({RF: named({"type": "array", "uniqueItems": True})}, SCHEMA_PATH),
    ({RF: named({"not": {"type": "string"}})}, SCHEMA_PATH),
    ({RF: named({"properties": {"a": {"nullable": True}}})}, SCHEMA_PATH),
    ({RF: named({"x-guidance": {"lenient": True}})}, SCHEMA_PATH),
    ({RF: named({"$ref": "https://example.com/schema"})}, SCHEMA_PATH),
    ({RF: named({"type": "integer", "minimum": 5, "maximum": 3})}, SCHEMA_PATH),
    ({RF: named({"enum": [f"value {i}" for i in range(5000)]})}, SCHEMA_PATH),
    ({SO: "x"}, SO),
    ({SO: {}}, SO),
    ({SO: {"regex": "a", "choice": ["b"]}}, SO),
    ({SO: {"regex": "("}}, f"{SO}.regex"),
    ({SO: {"regex": ""}}, f"{SO}.regex"),
    ({SO: {"regex": 5}}, f"{SO}.regex"),
    ({SO: {"regex": "(?=a)a"}}, f"{SO}.regex"),
    ({SO: {"regex": r"(a)\1"}}, f"{SO}.regex"),
    ({SO: {"choice": []}}, f"{SO}.choice"),
    ({SO: {"choice": "yes"}}, f"{SO}.choice"),
    ({SO: {"choice": ["yes", ""]}}, f"{SO}.choice[1]"),
    ({SO: {"choice": ["yes", 1]}}, f"{SO}.choice[1]"),
    ({SO: {"choice": ["x"] * 4097}}, f"{SO}.choice"),
    ({SO: {"json": "{"}}, f"{SO}.json"),
    ({SO: {"json": 5}}, f"{SO}.json"),
    ({SO: {"json": "[" + "[]," * 2**18 + "[]]"}}, f"{SO}.json"),
    ({SO: {"grammar": "start: undefined"}}, f"{SO}.grammar"),
    ({SO: {"grammar": "root ::= undefined"}}, f"{SO}.grammar"),
    ({SO: {"grammar": "start: <|no_such_token|>"}}, f"{SO}.grammar"),
    ({SO: {"grammar": 'start: x\nx[temperature=2]: "a"'}}, f"{SO}.grammar"),
    ({SO: {"grammar": 'start: %json {"uniqueItems": true}'}}, f"{SO}.grammar"),
    ({SO: {"json_object": False}}, f"{SO}.json_object"),
    ({SO: {"json": {}, "whitespace_pattern": " "}}, f"{SO}.whitespace_pattern"),
    ({SO: {"structural_tag": "{}"}}, f"{SO}.structural_tag"),
    ({SO: {"regex": "a", "mood": 1}}, f"{SO}.mood"),
    ({SO: {"regex": "a"}, RF: {"type": "json_object"}}, SO),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused(
    served: Served, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """A clear 400 that names the field; nothing reaches the engine."""
    before = len(served.client.submitted)
    reply = post(http, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 500
    assert len(served.client.submitted) == before


class Part(BaseModel):
    kind: Literal["bolt", "nut"]
    weight: float | None
    parts: list[Part]


class Order(BaseModel):
    """With references, recursion, an enum and a null, as pydantic and the SDK write them."""

    title: str
    first: Part
    spare: Part | None
    tags: list[str]


def test_strict_schemas_of_the_sdk_are_honoured(served: Served) -> None:
    """What `parse` sends for a pydantic model compiles, references included."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    # The fake engine's text is not JSON, so only the request is under test here.
    with client, pytest.raises((openai.LengthFinishReasonError, ValueError)):
        client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "x"}], response_format=Order
        )
    grammar = served.client.submitted[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source)["additionalProperties"] is False


def test_a_grammar_that_fails_in_the_engine_is_a_400() -> None:
    """Law: bad input is never a 5xx, even if it is detected in the middle of the reply."""
    client = FakeClient(refusal="the grammar takes too long to follow", bad_request=True)
    with serve(client) as served, httpx.Client(base_url=served.url, timeout=30) as http:
        reply = post(http, structured_outputs={"regex": "[ab]+"})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == ("generation_failed", "invalid_request_error")
